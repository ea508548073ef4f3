-- ARGV[5]: worker, [6]: the head of the tokens, [7]: limit, [8]: `{lease of other names in ms, name, lease, ...}`.
-- Answers `{{id, name, data, opts, timestamp, attempts, attemptsMade, stalledCounter, failedReason, stacktrace, facts,
-- lease, ...}, {ids dropped}, {id, why, ...}}`, the last for those set aside. The token of the n-th claim is the head and n in four hexadecimal digits.
local worker, head, limit = ARGV[5], ARGV[6], tonumber(ARGV[7])
local leases, wanted = {}, cmsgpack.unpack(ARGV[8])
for at = 2, #wanted, 2 do
  leases[wanted[at]] = wanted[at + 1]
end
local READ_AT_ONCE, LOCKED_PASSED, ENOUGH_BYTES = 200, 1000, 8 * 1024 * 1024

redis.call('ZADD', SEEN, now, worker)
line_up_what_is_due(math.max(math.min(limit, AT_ONCE), DUE_AT_ONCE))
if paused then
  finish()
  return cmsgpack.pack({ {}, dropped, told })
end

local answer, taken, bytes, mine = {}, {}, 0, {}

local function grant(id, found)
  local lease = leases[found[1] or 'default'] or wanted[1]
  taken[#taken + 1] = id
  mine[id] = true
  local token = head .. string.format('%04x', #taken)
  redis.call('SET', P .. id .. ':lock', token, 'PX', lease)
  redis.call('HMSET', P .. id, CLAIM, '+' .. token .. worker, 'lockAcquired', '1')
  answer[#answer + 1] = id
  for at = 1, 10 do
    answer[#answer + 1] = found[at]
  end
  answer[#answer + 1] = lease
  bytes = bytes + #found[2] + #(found[3] or '')
  tell(EVENT.active, id)
end

-- Grant the job, or drop it if it has no record. One that is completed, or granted in this call already, is skipped. Tell
-- whether it is another library's, and stays in line.
local function sort_out(id, completed)
  if mine[id] or completed == 1 then
    return
  end
  local found = fields(
    id, 'name', 'data', 'opts', 'timestamp', 'attempts', 'attemptsMade', 'stalledCounter', 'failedReason', 'stacktrace', 'workers:error'
  )
  if found and is_later(found[1], found[5]) then
    return true
  elseif found and found[2] then
    grant(id, found)
  else
    drop(id)
  end
end

-- A job in line that is locked is about to be unlocked, or taken out, by the holder of the lock: leave it where it is.
local passed, later = 0, false
while #taken < limit and passed < LOCKED_PASSED and bytes <= ENOUGH_BYTES do
  local width = math.min(limit - #taken, READ_AT_ONCE)
  local line = redis.call('LRANGE', WAIT, -(passed + width), -(passed + 1))
  if #line == 0 then
    break
  end
  local holders, completed = locks_of(line), redis.call('SMISMEMBER', COMPLETED, unpack(line))
  local gone, stay = {}, 0
  for at = #line, 1, -1 do
    if bytes > ENOUGH_BYTES then
      break
    end
    local id = line[at]
    if holders[at] and not mine[id] then
      stay = stay + 1
    elseif sort_out(id, completed[at]) then
      stay, later = stay + 1, true
    else
      gone[#gone + 1] = id
    end
  end
  if passed + stay == 0 then
    redis.call('LTRIM', WAIT, 0, -(#gone + 1))
  else
    for _, id in ipairs(gone) do
      redis.call('LREM', WAIT, -1, id)
    end
  end
  passed = passed + stay
end
batched('LPUSH', ACTIVE, taken)
finish()
if later and #taken == 0 then -- else the next claim says so
  return redis.error_reply(LATER_JOB)
end
return cmsgpack.pack({ answer, dropped, told })
