-- Answers since when the next job of the line, or one that is due, waits, in milliseconds; nothing if none is queued.
local oldest
local function note(at)
  oldest = math.min(oldest or at, at)
end
for _, line in ipairs({ WAIT, PAUSED }) do
  local first = redis.call('LINDEX', line, -1)
  local found = first and fields(first, 'timestamp')
  if found and found[1] then
    note(whole(found[1]))
  end
end
local first = tonumber(redis.call('ZRANGE', DELAYED, 0, 0, 'WITHSCORES')[2])
local due = first and math.floor(first / SCALE)
if due and due <= now then
  note(due)
end
return oldest and string.format('%.0f', oldest) or false
