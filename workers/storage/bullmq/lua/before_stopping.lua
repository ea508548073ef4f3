-- In front of BullMQ's moveToFinished, whose keys and arguments these are: its job is cancelled. ARGV[10]: until when the
-- record lasts, empty for not at all; [11]: where the job was.
local token = cmsgpack.unpack(ARGV[8])['token']
if redis.call('GET', KEYS[12] .. ':lock') == token and redis.call('LPOS', KEYS[2], ARGV[1], 'RANK', -1) then
  redis.call('HDEL', KEYS[12], 'workers:cancel')
  -- A key by BullMQ's throttle outlives a failed job, and not one that was cancelled, as it would not a removed one.
  local key = ARGV[7] .. 'de:' .. (redis.call('HGET', KEYS[12], 'deid') or '')
  if redis.call('TYPE', key).ok == 'string' and redis.call('GET', key) == ARGV[1] then
    redis.call('DEL', key)
  end
  redis.call('XADD', KEYS[4], 'MAXLEN', '~', 10000, '*', 'event', 'cancelled', 'jobId', ARGV[1])
  if ARGV[10] ~= '' then
    redis.call('ZADD', ARGV[7] .. 'workers:cancelled', ARGV[10], ARGV[1])
  end
end
