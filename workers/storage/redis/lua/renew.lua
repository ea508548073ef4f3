-- Renew leases. ARGV[2]: the claims, each `{id, token, lease}`; then the workers. Answers `{place of the claim, code,
-- ...}` for claims that are lost (for one of three reasons) or to be cancelled.
local TAKEN, OVER, UNKNOWN, CANCEL = 2, 3, 4, 6
local claims = cmsgpack.unpack(ARGV[2])
for at = 3, #ARGV do
  redis.call('ZADD', WORKERS, now, ARGV[at])
end
local ids = {}
for at, claim in ipairs(claims) do
  ids[at] = claim[1]
end
local packed = fetch(RUNS, ids)
local answer, deadlines = {}, {}

local function look(at, id, token)
  local run = packed[at] and read_run(packed[at])
  if run and run.state == STATE.processing and run.token == token then
    deadlines[#deadlines + 1] = now + claims[at][3]
    deadlines[#deadlines + 1] = id
    return run.cancel == 1 and CANCEL or nil
  end
  if not run then
    return redis.call('HEXISTS', JOBS, id) == 1 and TAKEN or UNKNOWN
  end
  if LINE_OF[run.state] then
    return run.expires <= now and UNKNOWN or OVER
  end
  return TAKEN
end

for at, claim in ipairs(claims) do
  local code = look(at, claim[1], claim[2])
  if code then
    answer[#answer + 1] = at
    answer[#answer + 1] = code
  end
end
batched('ZADD', LEASES, deadlines)
return cmsgpack.pack(answer)
