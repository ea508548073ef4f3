-- In front of BullMQ's moveToWaitingChildren.
local broken = damage(ARGV[5], { 'active', 'waiting-children', 'stalled', 'events' })
if broken then
  return broken
end
