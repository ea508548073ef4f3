-- ARGV[5]: behind how many of the ids that may be cancelled to go on. Answers how many of the next ones are, how many were
-- looked at, and how many of those are forgotten, because somebody has run them again.
local LOOKED_AT = 1000
local later_than_now = '(' .. string.format('%.0f', now)
local ids = redis.call('ZRANGEBYSCORE', CANCELLED, later_than_now, '+inf', 'LIMIT', ARGV[5], LOOKED_AT)
local cancelled, gone = 0, {}
for _, id in ipairs(ids) do
  local state = exists(id) and state_of(id)
  if state == STATE.cancelled then
    cancelled = cancelled + 1
  elseif state then
    gone[#gone + 1] = id
  end
end
batched('ZREM', CANCELLED, gone)
return { cancelled, #ids, #gone }
