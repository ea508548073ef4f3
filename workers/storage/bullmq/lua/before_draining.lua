-- In front of BullMQ's drain, whose keys these are: find the next jobs of schedulers that are due.
local spared, schedulers = {}, redis.call('ZRANGE', KEYS[5], 0, -1, 'WITHSCORES')
for at = 1, #schedulers, 2 do
  local id = 'repeat:' .. schedulers[at] .. ':' .. schedulers[at + 1]
  for _, line in ipairs({ KEYS[1], KEYS[2] }) do
    local place = not redis.call('ZSCORE', KEYS[3], id) and redis.call('LPOS', line, id)
    if place then
      spared[#spared + 1] = { line = line, id = id, place = place }
    end
  end
end
table.sort(spared, function(one, other) return one.place < other.place end)
