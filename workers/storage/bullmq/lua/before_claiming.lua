-- In front of BullMQ's moveToActive.
local broken = damage(ARGV[1], { 'wait', 'active', 'prioritized', 'events', 'marker', 'pc', 'limiter' })
if broken then
  return broken
end
