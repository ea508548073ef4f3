-- Limit the queue as BullMQ's setGlobalConcurrency and setGlobalRateLimit do, unless a newer version did.
-- KEYS[1]: BullMQ's `meta`, [2]: which of its fields we set, and in which version, [3]: `marker`.
-- ARGV[1]: prefix of the queue's keys, [2]: the version, [3] to [5]: concurrency, max, duration, '' for what has no limit.
-- What another program has limited stays, if this does not say otherwise.
local broken = damage(ARGV[1], { 'meta', 'marker', 'workers:limits' })
if broken then
  return broken
end
local kept = tonumber(redis.call('HGET', KEYS[2], 'version') or '')
if kept and kept > tonumber(ARGV[2]) then
  return 0
end

-- Set these fields to these values; or, without, take back what we had set, unless another program has changed it since.
local function limit(names, values)
  local unchanged = true
  for at, name in ipairs(names) do
    unchanged = unchanged and redis.call('HGET', KEYS[1], name) == redis.call('HGET', KEYS[2], name)
    if values[at] ~= '' then
      redis.call('HSET', KEYS[1], name, values[at])
      redis.call('HSET', KEYS[2], name, values[at])
    end
  end
  if values[1] == '' then
    redis.call('HDEL', KEYS[2], unpack(names))
    if unchanged then
      redis.call('HDEL', KEYS[1], unpack(names))
    end
  end
end

redis.call('HSET', KEYS[2], 'version', ARGV[2])
limit({ 'concurrency' }, { ARGV[3] })
limit({ 'max', 'duration' }, { ARGV[4], ARGV[5] }) -- never one of the two: BullMQ's script would stop half-way
redis.call('ZADD', KEYS[3], 0, '0') -- a job that was kept back may be one that starts now
return 1
