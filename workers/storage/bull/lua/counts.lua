-- Count jobs. ARGV[5]: where among the delayed jobs to go on counting, -1 to begin. Answers the jobs in line, delayed,
-- active, completed and failed, and how many of the delayed are due; then how many of the next delayed ones have failed
-- before, how many were looked at, and from where.
local LOOKED_AT = 1000
local function left(line)
  return math.max(0, redis.call('SCARD', line) - redis.call('ZCOUNT', ENDED[line], '-inf', string.format('%.0f', now)))
end
local due = redis.call('ZCOUNT', DELAYED, '-inf', '(' .. string.format('%.0f', (now + 1) * SCALE))
local from = math.max(due, tonumber(ARGV[5]))
local some, failing = redis.call('ZRANGE', DELAYED, from, from + LOOKED_AT - 1), 0
for _, id in ipairs(some) do
  local found = fields(id, 'failedReason', 'attemptsMade') or {}
  if found[1] or whole(found[2]) > 0 then
    failing = failing + 1
  end
end
return {
  redis.call('LLEN', WAIT) + redis.call('LLEN', PAUSED), redis.call('ZCARD', DELAYED), redis.call('LLEN', ACTIVE), left(COMPLETED),
  left(FAILED), due, failing, #some, from,
}
