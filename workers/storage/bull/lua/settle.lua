-- ARGV[5]: the settlements, each `{id, token, kind, ...}`; [6]: uncounted retries allowed in a row.
-- Answers a code for each.
local APPLIED, ALREADY, OCCUPIED = 0, 1, 5
local COMPLETE, RETRY, FAIL, RELEASE, CONTINUE, STOP, SNOOZE = 1, 2, 3, 4, 5, 6, 7

-- Tell whether something other than a job is at the key of this one.
local function is_occupied(id)
  local kind = redis.call('TYPE', P .. id).ok
  return kind ~= 'none' and kind ~= 'hash'
end

-- End the attempt and forget what was noted of it.
local function let_go(id)
  redis.call('HDEL', P .. id, 'lockAcquired', 'workers:cancel')
  unlock(id)
end

local function complete(id, token, keep, returnvalue, exact, next)
  local changes = { 'returnvalue', returnvalue, CLAIM, '-' .. token }
  if exact then
    changes[5], changes[6] = 'workers:result', exact
  end
  conclude(id, COMPLETED, keep, changes, returnvalue)
  if next then
    add(next)
  end
end

local function failure(job, token, counted, reason, stack, facts, noted)
  return {
    FAILURES, with_failure(job.failures or '', counted and noted, now),
    'attemptsMade', string.format('%.0f', whole(job.made) + (counted and 1 or 0)), 'stacktrace', with_stack(job.stacks, stack),
    'failedReason', reason, 'workers:error', facts, CLAIM, '-' .. token,
  }
end

-- Return whether the retry uses up an attempt, and how many uncounted ones in a row that makes.
local function count(uncounted, counted)
  if counted or uncounted >= tonumber(ARGV[6]) then
    return true, 0
  end
  return false, uncounted + 1
end

local function put_off(id, job, delay)
  let_go(id)
  if delay > 0 then
    delay_until(later(delay), low_bits(id), id)
  else
    line_up_at_once(id, job.opts)
  end
end

local function retry(id, token, job, delay, reason, stack, facts, counted, keep, noted)
  local counts, in_a_row = count(whole(job.uncounted), counted)
  if counts and not counted and job.spent + 1 >= whole(job.attempts) then
    facts = string.gsub(facts, '"exhausted":false', '"exhausted":true')
    return conclude(id, FAILED, keep, failure(job, token, true, reason, stack, facts, noted), '{}')
  end
  local changes = failure(job, token, counts, reason, stack, facts, noted)
  changes[#changes + 1] = 'workers:uncounted'
  changes[#changes + 1] = in_a_row
  redis.call('HMSET', P .. id, unpack(changes))
  put_off(id, job, delay)
  tell(EVENT.failing, id)
  emit('failed', id, '{}')
end

local function snooze(id, token, job, delay)
  redis.call('HSET', P .. id, CLAIM, '-' .. token)
  put_off(id, job, delay)
  tell(EVENT.queued, id)
end

-- The record becomes that of the next link, except its id, date and progress.
local function continue(id, token, next)
  local _, name, data, opts, attempts, delay = unpack(next)
  local eta = delay > 0 and later(delay) or now
  redis.call(
    'HMSET', P .. id, 'data', data, 'opts', opts, 'delay', milliseconds(delay), 'attempts', attempts, 'attemptsMade',
    '0', 'stacktrace', '[]', 'returnvalue', 'null', 'name', name, CLAIM, '-' .. token
  )
  redis.call('HDEL', P .. id, 'failedReason', 'stalledCounter', 'workers:error', 'workers:uncounted', FAILURES)
  let_go(id)
  if delay > 0 then
    delay_until(eta, low_bits(id), id)
  else
    line_up(id)
  end
  tell(EVENT.queued, id)
  emit('waiting', id)
end

local function apply(id, token, job, settlement)
  local kind = settlement[3]
  if kind == COMPLETE then
    complete(id, token, unpack(settlement, 4, 7))
  elseif kind == RETRY then
    retry(id, token, job, unpack(settlement, 4, 10))
  elseif kind == SNOOZE then
    snooze(id, token, job, settlement[4])
  elseif kind == FAIL then
    conclude(id, FAILED, settlement[4], failure(job, token, true, unpack(settlement, 5, 8)), '{}')
  elseif kind == STOP then
    local made = whole(job.made) + 1
    local changes = { 'attemptsMade', string.format('%.0f', made), CLAIM, '-' .. token }
    stop(id, settlement[4], made, job.stalls, settlement[5], settlement[6], changes)
  elseif kind == CONTINUE then
    continue(id, token, settlement[4])
  else
    redis.call('HSET', P .. id, CLAIM, '-' .. token)
    let_go(id)
    line_up_in_front(id)
    tell(EVENT.queued, id)
  end
end

-- The claim may still end a job that Node's sweep has put back into the line, if nobody has taken it since.
local function leave(id)
  return redis.call('LREM', ACTIVE, -1, id) > 0 or leave_line(id) > 0
end

local function settle(settlement, holder)
  local id, token = settlement[1], settlement[2]
  local found = fields(id, CLAIM, 'attempts', 'attemptsMade', 'stalledCounter', 'name', 'workers:uncounted', 'stacktrace', 'opts', FAILURES)
  local mark = found and found[1]
  if mark == '-' .. token then
    return ALREADY
  end
  local reason = why_not_held(id, token, mark, holder)
  if reason then
    return reason
  elseif settlement[3] == COMPLETE and settlement[7] and is_occupied(settlement[7][1]) then
    return OCCUPIED
  elseif not leave(id) then
    return loss(id)
  end
  apply(id, token, {
    attempts = found[2], made = found[3], stalls = found[4], spent = whole(found[3]) + (found[5] and whole(found[4]) or 0), uncounted = found[6],
    stacks = found[7], opts = found[8], failures = found[9],
  }, settlement)
  return APPLIED
end

local settlements, outcomes = cmsgpack.unpack(ARGV[5]), {}
for _, settlement in ipairs(settlements) do
  if broken_counter and settlement[3] == COMPLETE and settlement[7] then
    return redis.error_reply(broken_counter)
  end
end
local holders = holders_of(settlements)
for at, settlement in ipairs(settlements) do
  outcomes[at] = settle(settlement, holders[at])
end
finish()
return cmsgpack.pack(outcomes)
