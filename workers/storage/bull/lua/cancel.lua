-- Cancel a waiting job, or ask a running one to end. ARGV[5]: `{ids}` it may have, [6]: how long its tombstone lasts.
-- Answers the state it was in, nothing if there is no such job.
local id, state = find(cmsgpack.unpack(ARGV[5]))
if not id then
  return false
end
if state == STATE.processing then
  redis.call('HSET', P .. id, 'workers:cancel', '1')
  request_cancel(id)
elseif state ~= STATE.completed and state ~= STATE.failed then
  take(id, state)
  redis.call('DEL', P .. id)
  redis.call('ZADD', CANCELLED, now + tonumber(ARGV[6]), id)
  tell(EVENT.cancelled, id)
end
finish()
return state
