-- ARGV[5]: `{ids}` the job may have, [6]: what Node reads as the reason of its failure, [7]: our facts
-- about it. Answers the state it was in, nothing for no job.
local id, state = find(cmsgpack.unpack(ARGV[5]))
if not id then
  return false
end
if state == STATE.processing then
  redis.call('HSET', P .. id, 'workers:cancel', '1')
  request_cancel(id)
elseif not ended(state) then
  take(id, state)
  local found = fields(id, 'opts', 'attemptsMade', 'stalledCounter') or {}
  redis.call('HDEL', P .. id, CLAIM)
  stop(id, keep_of(options(found[1]), 'keepFailed'), found[2], found[3], ARGV[6], ARGV[7], {})
end
finish()
return state
