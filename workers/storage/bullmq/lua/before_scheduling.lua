-- In front of BullMQ's updateJobScheduler, whose keys and arguments these are; ARGV[8]: why the caller cannot tell what
-- follows. Answers nothing if the job is not its scheduler's current one, and `{why}` if nothing can be added here.
-- BullMQ's script would move the scheduler on first, and then stop at what this looks for.
local broken = damage(ARGV[6], { 'repeat', 'delayed', 'wait', 'active', 'prioritized', 'marker', 'meta', 'id', 'events', 'pc' })
if broken then
  return broken
end
local due = tonumber(redis.call('ZSCORE', KEYS[1], ARGV[2]) or '')
if not due or string.sub(ARGV[7], -#tostring(due) - 1) ~= ':' .. due then
  return
end
local name, every, count, data = unpack(redis.call('HMGET', KEYS[1] .. ':' .. ARGV[2], 'name', 'every', 'ic', 'data'))
local _, colons = string.gsub(ARGV[2], ':', '')
if colons >= 4 and not count then
  return { 'it is a repeatable job with a key of older versions of BullMQ, and has no job scheduler' }
end
if ARGV[7] ~= 'repeat:' .. ARGV[2] .. ':' .. due then
  return
end
if ARGV[8] ~= '' then
  return { ARGV[8] }
end
local options = cmsgpack.unpack(ARGV[4])
every = tonumber(every or options['repeat']['every'] or '')
if (every or ARGV[1] == '') and not (every and every >= 1 and every <= 2^53) then
  return { 'its period is no number of milliseconds' }
end
if not name then
  return { 'its scheduler has no name' }
end
if (options.priority and type(options.priority) ~= 'number') or (options.de and type(options.de) ~= 'table')
  or not pcall(cjson.encode, options) then
  return { 'its options cannot be stored' }
end
if not data and ARGV[3] ~= '{}' then -- a repeatable job of BullMQ 5 keeps its data in its jobs alone
  redis.call('HSET', KEYS[1] .. ':' .. ARGV[2], 'data', ARGV[3])
end
