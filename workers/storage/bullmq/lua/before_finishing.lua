-- In front of BullMQ's moveToFinished, whose keys and arguments these are.
local broken = damage(ARGV[7], { 'wait', 'active', 'prioritized', 'stalled', 'events', 'meta', ARGV[5] })
  or refusal(ARGV[7], KEYS[12], ARGV[5])
if broken then
  return broken
end
