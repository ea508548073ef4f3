-- Change a record's retention. ARGV[5]: `{ids}` the job may have, [6]: how long it is kept from now, in ms. Answers
-- whether the job had ended.
local id, state = find(cmsgpack.unpack(ARGV[5]))
local line = state == STATE.completed and COMPLETED or starts_anew(state) and FAILED
if not line then
  return 0
end
local expires = string.format('%.0f', now + tonumber(ARGV[6]))
redis.call('HSET', P .. id, 'workers:expires', expires)
redis.call('ZADD', ENDED[line], expires, id)
if state == STATE.cancelled then
  redis.call('ZADD', CANCELLED, expires, id)
end
return 1
