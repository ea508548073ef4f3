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
redis.call('HSET', KEYS[2], 'version', ARGV[2])
for at, name in ipairs({ 'concurrency', 'max', 'duration' }) do
  local ours, wanted = redis.call('HGET', KEYS[2], name), ARGV[2 + at]
  if wanted ~= '' then
    redis.call('HSET', KEYS[1], name, wanted)
    redis.call('HSET', KEYS[2], name, wanted)
  elseif ours then
    redis.call('HDEL', KEYS[2], name)
    if redis.call('HGET', KEYS[1], name) == ours then
      redis.call('HDEL', KEYS[1], name)
    end
  end
end
redis.call('ZADD', KEYS[3], 0, '0') -- a job that was kept back may be one that starts now
return 1
