-- Renew leases. ARGV[5]: the claims, each `{id, token, lease in ms}`; then the workers. Answers `{place of the claim,
-- code, ...}` for claims that are lost (for one of three reasons) or to be cancelled.
local CANCEL = 6
for at = 6, #ARGV do
  redis.call('ZADD', SEEN, now, ARGV[at])
end

-- Put the job back where a claim has it. If Node's sweep took it for abandoned, and nobody has taken it since, nothing
-- is lost.
local function hold(id, holder)
  if holder or redis.call('LPOS', ACTIVE, id) then
    return true
  end
  if leave_line(id) == 0 then
    return false
  end
  redis.call('LPUSH', ACTIVE, id)
  return true
end

local function renew(id, token, lease, holder)
  local found = fields(id, CLAIM, 'workers:cancel')
  local reason = why_not_held(id, token, found and found[1], holder)
  if reason then
    return reason
  elseif not hold(id, holder) then
    return loss(id)
  end
  redis.call('SET', P .. id .. ':lock', token, 'PX', lease)
  return found[2] == '1' and CANCEL or nil
end

local claims, answer = cmsgpack.unpack(ARGV[5]), {}
local holders = holders_of(claims)
for at, claim in ipairs(claims) do
  local code = renew(claim[1], claim[2], claim[3], holders[at])
  if code then
    answer[#answer + 1] = at
    answer[#answer + 1] = code
  end
end
return cmsgpack.pack(answer)
