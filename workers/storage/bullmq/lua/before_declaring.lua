-- In front of BullMQ's addJobScheduler, whose keys and arguments these are. What the caller saw of the scheduler, and
-- decided upon: ARGV[10]: when its next job is due, [11]: the options of its template, [12]: its removed version; each
-- '' if there was none. Answers nothing if that has changed since.
-- BullMQ's script replaces the next job each time it is called: of two callers the second would make the first one's go.
local broken = damage(ARGV[8], { 'repeat', 'delayed', 'wait', 'paused', 'active', 'prioritized', 'marker', 'meta', 'id',
  'events', 'pc', 'workers:removed-crons' })
if broken then
  return broken
end
local options = redis.call('HGET', KEYS[1] .. ':' .. ARGV[3], 'opts') or ''
local removed = redis.call('HGET', ARGV[8] .. 'workers:removed-crons', ARGV[3]) or ''
local due = redis.call('ZSCORE', KEYS[1], ARGV[3])
if tonumber(due or '') ~= tonumber(ARGV[10]) or options ~= ARGV[11] or removed ~= ARGV[12] then
  return
end
