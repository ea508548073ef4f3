-- How new jobs come to follow others; `new[9]` is `{what if one does not complete, ids}`.

-- Return the place of a job, and those that it is to follow although nobody knows of them; nothing if there is none.
local function refused(jobs)
  local earlier = {}
  for at, new in ipairs(jobs) do
    local must_know = new[9] and new[9][1] == FAILS and not earlier[new[1]]
    local known = must_know and lookup(new[1])
    if must_know and (not known or STARTS_ANEW[known.state]) then
      local unknown = {}
      for _, other in ipairs(new[9][2]) do
        if not earlier[other] and end_of(other) == 0 then
          unknown[#unknown + 1] = other
        end
      end
      if #unknown > 0 then
        return { -1, at, unknown }
      end
    end
    earlier[new[1]] = true
  end
end

-- Return those that the new job has to wait for; or nothing, and the error with which it fails at once. It is told of those
-- that have ended.
local function left_to_follow(new, added)
  local left, because = {}
  forget_told(new[1])
  for _, other in ipairs(new[9][2]) do
    local how, fault, result
    if added[other] then
      how, fault = LINE_OF[added[other][1]] and added[other][1] or nil, added[other].fault
    else
      how, fault, result = end_of(other)
    end
    if not how then
      left[#left + 1] = other
    else
      learn(new[1], other, how, fault, result)
      if how ~= STATE.completed and new[9][1] == FAILS then
        because = because or because_of(other, how, fault)
      end
    end
  end
  return not because and left or nil, because
end

local function wait_for(id, run, created, policy, left)
  local members = {}
  run.state = STATE.waiting
  for at, other in ipairs(left) do
    members[2 * at - 1], members[2 * at] = 0, text(other) .. id
  end
  followed = true
  redis.call('HSET', RUNS, id, write_run(run))
  redis.call('ZADD', WAITING, created, id)
  batched('ZADD', DEPENDENTS, members)
  redis.call('HSET', AFTER, 'A' .. id, string.char(policy) .. cmsgpack.pack(left), 'L' .. id, #left)
end

-- Let the new job wait. Returns its state if it does not simply go on; then the error with which it fails at once.
local function follow(new, added, created, place)
  local left, fault = left_to_follow(new, added)
  if fault then
    return STATE.failed, fault
  elseif #left > 0 then
    wait_for(new[1], fresh_run(place), created, new[9][1], left)
    return STATE.waiting
  end
end
