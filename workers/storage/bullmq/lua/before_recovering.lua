-- In front of BullMQ's moveStalledJobsToWait.
local broken = damage(ARGV[2], { 'wait', 'active', 'stalled', 'events', 'marker', 'meta' })
if broken then
  return broken
end
-- Where nobody has added a job there is none to give back, and `meta`, which the script makes, would say that BullMQ has.
if redis.call('EXISTS', KEYS[1], KEYS[3], KEYS[5], KEYS[8]) == 0 then
  return {}
end
