-- Find jobs that are in no line. ARGV[5]: `{ids}`, [6]: 1 to put them into the line again. Answers their ids. One that
-- somebody has the lock of may still be ended by him.
local function is_in_a_line(id)
  for _, line in ipairs({ WAIT, PAUSED, ACTIVE }) do
    if redis.call('LPOS', line, id) then
      return true
    end
  end
  for _, line in ipairs({ COMPLETED, FAILED }) do
    if redis.call('SISMEMBER', line, id) == 1 then
      return true
    end
  end
  return redis.call('ZSCORE', DELAYED, id)
end

-- The job 1 of the queue `mail:prio:low` is where the job `prio:low:1` of the queue `mail` would be. Each queue has a counter.
local function is_of_another_queue(id)
  local colon = string.find(id, ':', 1, true)
  while colon do
    if redis.call('EXISTS', P .. string.sub(id, 1, colon) .. 'id') == 1 then
      return true
    end
    colon = string.find(id, ':', colon + 1, true)
  end
end

local found = {}
for _, id in ipairs(cmsgpack.unpack(ARGV[5])) do
  if exists(id) and not is_in_a_line(id) and not is_of_another_queue(id) and not is_locked(id, {}) then
    found[#found + 1] = id
    if ARGV[6] == '1' then
      redis.call('HSET', P .. id, 'delay', '0')
      redis.call('HDEL', P .. id, CLAIM, 'lockAcquired')
      line_up(id)
      tell(EVENT.queued, id)
      emit('waiting', id)
    end
  end
end
finish()
return cmsgpack.pack(found)
