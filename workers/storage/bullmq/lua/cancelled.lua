-- KEYS: the jobs that may be cancelled, by when their records expire; BullMQ's failed jobs. ARGV[1]: prefix of the jobs' keys,
-- [2]: now, [3]: behind how many of the ids to go on. Answers how many of the next ones are cancelled, how many were looked
-- at, and how many of those are forgotten, because somebody has run them again or removed them.
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. ARGV[2], '+inf', 'LIMIT', ARGV[3], 1000)
local cancelled, gone = 0, {}
for _, id in ipairs(ids) do
  local found = redis.pcall('HMGET', ARGV[1] .. id, 'workers:stopped', 'finishedOn')
  if not found.err and found[1] and found[1] == found[2] and redis.call('ZSCORE', KEYS[2], id) then
    cancelled = cancelled + 1
  else
    gone[#gone + 1] = id
  end
end
if #gone > 0 then
  redis.call('ZREM', KEYS[1], unpack(gone))
end
return { cancelled, #ids, #gone }
