-- Functions that tell whether a claim still holds its job.
local TAKEN, OVER, UNKNOWN = 2, 3, 4

-- Return the token in the lock of each claim's job; a claim begins with the job's id.
local function holders_of(claims)
  local ids = {}
  for at, claim in ipairs(claims) do
    ids[at] = claim[1]
  end
  return locks_of(ids)
end

-- Return why a claim does not have a job that lacks its mark.
local function loss(id)
  if not exists(id) then
    return UNKNOWN
  end
  local state = state_of(id)
  if not state then
    return UNKNOWN
  end
  return ended(state) and OVER or TAKEN
end

-- Return nothing while nobody else has the job: its lock is the claim's own, or has run out.
local function why_not_held(id, token, mark, holder)
  if not mark or string.sub(mark, 1, 1 + TOKEN_LENGTH) ~= '+' .. token then
    return loss(id)
  end
  return holder and holder ~= token and TAKEN or nil
end
