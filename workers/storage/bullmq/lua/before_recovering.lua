-- In front of BullMQ's moveStalledJobsToWait.
local broken = damage(ARGV[2], { 'wait', 'active', 'stalled', 'events', 'marker', 'meta' })
if broken then
  return broken
end
