-- In front of BullMQ's extendLocks.
local broken = damage(ARGV[1], { 'stalled' })
if broken then
  return broken
end
