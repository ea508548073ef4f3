-- The front of `enqueue`: add a single job whose id is new, with no more of the queue than it needs. What all scripts begin
-- with (types of every key, functions of records and lines) takes five times as long as adding one. Anything out of the
-- ordinary is left to them, as if nothing had happened: a known id, an urgent job, a limit or fair key, a key of the wrong
-- type. So all keys are read before the first write, which is the only one that may fail.
local jobs = cmsgpack.unpack(ARGV[2])

local function added_alone(id, name, key, priority, delay, version, rest)
  local BASE = KEYS[1]
  local JOBS, META, SLEEPERS = BASE .. ':jobs', BASE .. ':meta', BASE .. ':sleepers'
  if priority < 0 or string.byte(key) == 30 or redis.pcall('HEXISTS', JOBS, id) ~= 0 then
    return false
  end
  local last, asleep = redis.pcall('HGET', META, 'place'), redis.pcall('HMGET', SLEEPERS, '*', name)
  if type(last) == 'table' or asleep.err then
    return false
  end
  local clock = redis.call('TIME')
  local created = clock[1] * 1000000 + clock[2]
  last = tonumber(last or '0') or 0
  if last < 2 ^ 53 then
    created = math.max(last + 1, created)
  end
  local place = created + delay
  local standing = struct.pack('>I2c0I4I8', #name, name, priority, place) .. id
  local line, score = ':ready', 0
  if delay > 0 then
    line, score = ':scheduled', place
  end
  if redis.pcall('ZADD', BASE .. line, score, standing) ~= 1 then
    return false
  end
  redis.call('HSET', JOBS, id, struct.pack('>BI8I8', version, place, created) .. rest)
  redis.call('HSET', META, 'place', string.format('%.0f', created))
  if (asleep[1] or asleep[2]) and not ARGV[3] then
    redis.call('HDEL', SLEEPERS, '*', name)
    redis.pcall('PUBLISH', BASE .. ':wake@' .. ARGV[1], cmsgpack.pack({ name }))
  end
  redis.pcall('PUBLISH', BASE .. ':events@' .. ARGV[1], cmsgpack.pack({ 1, id }))
  return true
end

if #jobs == 1 and added_alone(unpack(jobs[1])) then
  return cmsgpack.pack({ 0 })
end
