-- Read jobs. ARGV[5]: jobs, each `{ids}` it may have. Answers for each 0, or `{id, state, due or -1, token in its lock,
-- fields}`.
local SHOWN = {
  'name', 'opts', 'timestamp', 'attempts', 'attemptsMade', 'stalledCounter', 'progress', 'stacktrace', 'failedReason', CLAIM,
  'workers:error', 'workers:stalled', 'workers:progress', 'workers:finished', 'workers:idle',
}
local answer = {}
for at, ids in ipairs(cmsgpack.unpack(ARGV[5])) do
  local id, state, due = find(ids)
  answer[at] = id and { id, state, due or -1, redis.call('MGET', P .. id .. ':lock')[1], fields(id, unpack(SHOWN)) } or 0
end
return cmsgpack.pack(answer)
