-- Return what a status is made of, for the first of the ids that exists: `{id, state, due or -1, token in its lock,
-- fields}`.
local SHOWN = {
  'name', 'opts', 'timestamp', 'attempts', 'attemptsMade', 'stalledCounter', 'progress', 'stacktrace', 'failedReason', CLAIM,
  'workers:error', 'workers:stalled', 'workers:progress', 'workers:finished', 'workers:idle',
}
local function shown(ids)
  local id, state, due = find(ids)
  return id and { id, state, due or -1, redis.call('MGET', P .. id .. ':lock')[1], fields(id, unpack(SHOWN)) }
end
