-- In front of BullMQ's retryJob.
local broken = damage(ARGV[1], { 'active', 'wait', 'prioritized', 'delayed', 'stalled', 'events', 'marker', 'meta', 'pc' })
if broken then
  return broken
end
