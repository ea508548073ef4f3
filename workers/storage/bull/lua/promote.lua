-- Put delayed jobs into the line now. ARGV[5]: jobs, each `{ids}` it may have. Answers how many there were.
local count = 0
for _, ids in ipairs(cmsgpack.unpack(ARGV[5])) do
  local id, state = find(ids)
  if state == STATE.scheduled or state == STATE.failing then
    redis.call('ZREM', DELAYED, id)
    redis.call('HSET', P .. id, 'delay', '0')
    line_up(id)
    count = count + 1
  end
end
finish()
return count
