-- In front of BullMQ's moveToDelayed.
local broken = damage(ARGV[1], { 'active', 'delayed', 'stalled', 'events', 'marker', 'meta' })
if broken then
  return broken
end
