-- Answers the place of the queued job that has waited longest, nothing if none is queued: a look at the first of each name
-- and priority, at most so many.
local FIRSTS = 1000
local oldest
local function note(place)
  oldest = math.min(oldest or place, place)
end
local from = '-'
for _ = 1, FIRSTS do
  local first = redis.call('ZRANGEBYLEX', READY, from, '+', 'LIMIT', 0, 1)[1]
  if not first then
    break
  end
  local read = read_member(first)
  if read then
    note(read.place)
    from = '(' .. string.sub(first, 1, #text(read.line) + 4) .. '\255'
  else
    from = '(' .. first
  end
end
for _, line in ipairs({ SCHEDULED, FAILING }) do
  local due = tonumber(redis.call('ZRANGE', line, 0, 0, 'WITHSCORES')[2])
  if due and due <= now then
    note(due)
  end
end
return oldest and string.format('%.0f', oldest) or false
