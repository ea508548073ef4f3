-- Pause or resume. ARGV[5]: 1 to pause, 0 to resume. The jobs of both lines are put into the one that counts; those
-- that were paused run first.
local from, to = WAIT, PAUSED
if ARGV[5] ~= '1' then
  from, to = PAUSED, WAIT
end
if redis.call('EXISTS', to) == 0 then
  if redis.call('EXISTS', from) == 1 then
    redis.call('RENAME', from, to)
  end
elseif ARGV[5] == '1' then
  while redis.call('RPOPLPUSH', from, to) do end
else
  while true do
    local id = redis.call('LPOP', from)
    if not id then
      break
    end
    redis.call('RPUSH', to, id)
  end
end
if ARGV[5] == '1' then
  redis.call('SET', META_PAUSED, '1')
else
  redis.call('DEL', META_PAUSED)
end
redis.pcall('PUBLISH', P .. 'paused', ARGV[5] == '1' and 'paused' or 'resumed')
return 1
