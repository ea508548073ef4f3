-- Read a page. ARGV[5]: a key of the queue, [6]: where in it, [7]: after how many of the entries there, [8]: how many
-- at once. Answers where the next entries are, -1 for no more, and the ids.
local line, scan, start, width = P .. ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
if ENDED[line] then
  local found = redis.call('SSCAN', line, ARGV[6], 'COUNT', width)
  local ids = {}
  for at = start + 1, #found[2] do
    ids[#ids + 1] = found[2][at]
  end
  return { found[1] == '0' and '-1' or found[1], ids }
end
local ids = {}
if line == DELAYED or line == CANCELLED then
  ids = redis.call('ZRANGE', line, scan + start, scan + width - 1)
else -- in the order in which they run
  local found = redis.call('LRANGE', line, -(scan + width), -(scan + start + 1))
  for at = #found, 1, -1 do
    ids[#ids + 1] = found[at]
  end
end
return { #ids < width - start and '-1' or string.format('%.0f', scan + width), ids }
