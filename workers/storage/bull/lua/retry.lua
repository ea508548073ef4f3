-- ARGV[5]: jobs, each `{ids}` it may have. Answers how many failed and cancelled ones are in line again, as if they
-- had never run.
local count = 0
for _, ids in ipairs(cmsgpack.unpack(ARGV[5])) do
  local id, state = find(ids)
  if starts_anew(state) then
    redis.call('SREM', FAILED, id)
    redis.call('ZREM', ENDED[FAILED], id)
    redis.call('ZREM', CANCELLED, id)
    redis.call('HMSET', P .. id, 'attemptsMade', '0', 'stacktrace', '[]', 'progress', '0')
    redis.call(
      'HDEL', P .. id, 'failedReason', 'stalledCounter', 'lockAcquired', CLAIM, 'workers:error', 'workers:stalled', 'workers:cancel',
      'workers:uncounted', 'workers:progress', 'workers:finished', 'workers:expires', STOPPED
    )
    line_up(id)
    tell(EVENT.queued, id)
    emit('waiting', id)
    count = count + 1
  end
end
finish()
return count
