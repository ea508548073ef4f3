-- ARGV[5]: jobs, each `{ids}` it may have. Answers the places of the failed and cancelled ones, which are in line again with
-- the attempts they have made, as Bull's own `retry` leaves them; and the ids of those that somebody has the lock of.
local places, locked = {}, {}
for place, ids in ipairs(cmsgpack.unpack(ARGV[5])) do
  local id, state = find(ids)
  if starts_anew(state) and not is_locked(id, locked) then
    redis.call('SREM', FAILED, id)
    redis.call('ZREM', ENDED[FAILED], id)
    redis.call('ZREM', CANCELLED, id)
    redis.call('HMSET', P .. id, 'stacktrace', '[]', 'progress', '0')
    redis.call(
      'HDEL', P .. id, 'failedReason', 'stalledCounter', 'lockAcquired', CLAIM, 'workers:error', 'workers:stalled', 'workers:cancel',
      'workers:uncounted', 'workers:progress', 'workers:finished', 'workers:expires', STOPPED, FAILURES
    )
    line_up_at_once(id, fields(id, 'opts')[1])
    tell(EVENT.queued, id)
    emit('waiting', id)
    places[#places + 1] = place
  end
end
finish()
return cmsgpack.pack({ places, locked })
