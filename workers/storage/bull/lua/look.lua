-- Look for work. Answers nothing when a claim may succeed, or has due jobs to line up, else the milliseconds until that
-- may change, -1 if unknown.
local LOOKED_AT, LOCKED_MS = 100, 50
local line = paused and {} or redis.call('LRANGE', WAIT, -LOOKED_AT, -1)
for _, holder in ipairs(locks_of(line)) do
  if not holder then
    return false
  end
end
local first = tonumber(redis.call('ZRANGE', DELAYED, 0, 0, 'WITHSCORES')[2])
local due = first and math.floor(first / SCALE) - now
if due and due <= 0 then
  return false
end
if #line > 0 then
  due = math.min(due or LOCKED_MS, LOCKED_MS)
end
return due and string.format('%.0f', due) or '-1'
