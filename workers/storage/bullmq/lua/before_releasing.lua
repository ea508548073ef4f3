-- In front of BullMQ's moveJobFromActiveToWait, whose first key is the list of active jobs.
local broken = damage(string.sub(KEYS[1], 1, -7), { 'active', 'wait', 'prioritized', 'stalled', 'events', 'marker', 'meta' })
if broken then
  return broken
end
