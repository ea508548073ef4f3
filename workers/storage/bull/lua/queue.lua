-- The beginning of every script that works on the queue: how jobs are found, put into a line and announced.

local others = other_owner()
if others then
  return redis.error_reply(others)
end

-- A wrong type found in the middle of a step would leave the step half done, so the types are checked first.
for kind, keys in pairs(KINDS) do
  for _, key in ipairs(keys) do
    local found = redis.call('TYPE', key).ok
    if found ~= 'none' and found ~= kind then
      return redis.error_reply(fault(key, kind))
    end
  end
end

-- Return the first millisecond that is not before `microseconds` from now.
local function later(microseconds)
  return math.ceil((clock[1] * 1000000 + clock[2] + microseconds) / 1000)
end

-- Return the field `delay` of a job that is put off by so many microseconds.
local function milliseconds(microseconds)
  return string.format('%.0f', math.ceil(microseconds / 1000))
end

-- In the hash of a job: `+` and the token of the claim that holds it, then its worker; `-` and the token that settled
-- it.
local CLAIM = 'workers:claim'
local TOKEN_LENGTH = 28

-- In the hash of a cancelled job, which is a failed one to Node: how often it had failed and was lost by then. Who runs it
-- once more without asking us changes that, and it was never cancelled.
local STOPPED = 'workers:stopped'

-- In the hash of a job: its failed attempts.
local FAILURES = 'workers:failures'

local HOUR = 3600 * 1000
local SCALE = 4096
local STACKS_BYTES = 64 * 1024

local function whole(text)
  local number = tonumber(text or 0)
  return number and number >= 0 and number <= 9007199254740992 and math.floor(number) or 0
end

-- Return the fields of a job; nothing if its key holds something else.
local function fields(id, ...)
  local found = redis.pcall('HMGET', P .. id, ...)
  return not found.err and found or nil
end

-- Return the token in the lock of each job, false if there is none.
local function locks_of(ids)
  local holders = {}
  for start = 1, #ids, AT_ONCE do
    local stop, keys = math.min(start + AT_ONCE - 1, #ids), {}
    for at = start, stop do
      keys[#keys + 1] = P .. ids[at] .. ':lock'
    end
    for at, holder in ipairs(redis.call('MGET', unpack(keys))) do
      holders[start + at - 1] = holder
    end
  end
  return holders
end

local function options(text)
  local good, opts = pcall(cjson.decode, text or '')
  return good and type(opts) == 'table' and opts or {}
end

-- Return how long a job's producer wants its record to last once it has ended; for ever if it says nothing.
local FOREVER = 36525 * 24 * HOUR
local function keep_of(opts, which)
  local ours = type(opts.workers) == 'table' and opts.workers or {}
  if which == 'keepCompleted' and DIALECT == 'C' and opts.removeOnComplete == true then
    return 0
  end
  local keep = ours[which]
  return type(keep) == 'number' and keep >= 0 and keep < FOREVER and math.floor(keep) or FOREVER
end

-- Return the line for jobs that are to run: never WAIT while the queue is paused, or a resume would lose them.
local paused = redis.call('EXISTS', META_PAUSED) == 1
local LINE = paused and PAUSED or WAIT

local function request_cancel(id)
  tell(EVENT.cancel_requested, id)
  redis.pcall('PUBLISH', P .. 'workers:cancels@' .. ARGV[1], id)
end

-- Return JSON text that Node can parse as a part of more, or something else in its place.
local strict
local function json(text, instead)
  if not strict then
    strict = cjson.new() -- the settings of the shared one are everybody's on this server
    strict.decode_invalid_numbers(false)
  end
  if not text or not pcall(strict.decode, text) then
    return instead
  end
  return (string.gsub(text, '[%z\1-\31]', ' '))
end

local listened = {}
local function is_listened(channel)
  if listened[channel] == nil then
    local found, patterns = redis.pcall('PUBSUB', 'NUMSUB', channel), redis.pcall('PUBSUB', 'NUMPAT')
    listened[channel] = not found.err and (found[2] > 0 or patterns > 0) -- a user may not be allowed to ask (ACL)
  end
  return listened[channel]
end

-- Tell Node processes of dialect C, if any listens, with the whole job as it is now.
local function emit(name, id, extra)
  local channel = name .. '@' .. QUEUE
  if DIALECT ~= 'C' or not is_listened(channel) then
    return
  end
  local found = fields(id, 'data', 'opts', 'progress', 'delay', 'timestamp', 'attempts', 'attemptsMade', 'stacktrace', 'returnvalue')
  if not found or not found[1] then
    return
  end
  local opts = string.match(json(found[2], '{}'), '^%s*{(.*)}%s*$') or ''
  local head = string.find(opts, '%S') and opts .. ',' or ''
  local numbers = {}
  for at = 3, 7 do
    numbers[at] = string.format('%.0f', whole(found[at]))
  end
  local job = '{"data":' .. json(found[1], 'null') .. ',"opts":{' .. head .. '"jobId":' .. cjson.encode(id)
    .. '},"progress":' .. numbers[3] .. ',"delay":' .. numbers[4] .. ',"timestamp":' .. numbers[5] .. ',"attempts":' .. numbers[6]
    .. ',"attemptsMade":' .. numbers[7] .. ',"stacktrace":' .. json(found[8], '[]') .. ',"returnvalue":' .. json(found[9], 'null') .. '}'
  redis.pcall('PUBLISH', channel, '["' .. EMITTER .. '",' .. job .. (extra and ',' .. json(extra, 'null') or '') .. ']')
end

-- Steps that are done for a whole batch at the end.
local unlocked, behind, in_front, ends = {}, {}, {}, { [COMPLETED] = {}, [FAILED] = {} }
local next_delayed

local function unlock(id)
  unlocked[#unlocked + 1] = P .. id .. ':lock'
end

local function line_up(id)
  behind[#behind + 1] = id
end

-- A group that is put back keeps its order.
local function line_up_in_front(id)
  in_front[#in_front + 1] = id
end

-- Line up a job that runs once more, next if its producer wants the last one first.
local function line_up_at_once(id, opts)
  if options(opts).lifo == true then
    line_up_in_front(id)
  else
    line_up(id)
  end
end

local function delay_until(eta, low, id)
  redis.call('ZADD', DELAYED, eta * SCALE + low, id)
  next_delayed = math.min(next_delayed or math.huge, eta * SCALE + low)
end

-- The low bits, which order jobs due in the same millisecond, come from the id of a job that is not new.
local function low_bits(id)
  return string.find(id, '^%d+$') and #id < 17 and tonumber(id) % SCALE or 0
end

local function announce(ids)
  for _, id in ipairs(ids) do
    redis.pcall('PUBLISH', P .. 'jobs', id)
  end
end

-- The last step of every script that changes something. A user who may not publish (ACL) has changed it all the same:
-- others find that as they look, and `examination.py` tells of it.
local function finish()
  for start = 1, #unlocked, AT_ONCE do
    redis.call('DEL', unpack(unlocked, start, math.min(start + AT_ONCE - 1, #unlocked)))
  end
  batched('ZADD', ENDED[COMPLETED], ends[COMPLETED])
  batched('ZADD', ENDED[FAILED], ends[FAILED])
  local reversed = {}
  for at = #in_front, 1, -1 do
    reversed[#reversed + 1] = in_front[at]
  end
  batched('LPUSH', LINE, behind)
  batched('RPUSH', LINE, reversed)
  announce(behind)
  announce(in_front)
  if next_delayed then
    redis.pcall('PUBLISH', P .. 'delayed', string.format('%.17g', next_delayed / SCALE))
  end
  if #events > 0 then
    redis.pcall('PUBLISH', P .. 'workers:events@' .. ARGV[1], cmsgpack.pack(events))
  end
end

-- Return when the record of a job that ended in this line expires. For a job that Node ended that is never, or unknown:
-- what the hash says may be about an end before Node ran the job again, and what the line says about a job that Node
-- has replaced.
local function expiry(line, id)
  local found = fields(id, 'workers:expires')
  local expires = found and tonumber(found[1] or '')
  return expires and tonumber(redis.call('ZSCORE', ENDED[line], id) or '') == expires and expires or nil
end

local function ended(state)
  return state == STATE.completed or state == STATE.failed or state == STATE.cancelled
end

-- After these an id may be used anew.
local function starts_anew(state)
  return state == STATE.failed or state == STATE.cancelled
end

local function stopped_at(made, stalls)
  return string.format('%.0f:%.0f', whole(made), whole(stalls))
end

local function is_cancelled(id)
  local found = fields(id, STOPPED, 'attemptsMade', 'stalledCounter') or {}
  return found[1] and found[1] == stopped_at(found[2], found[3])
end

-- Return the public state of a job whose hash exists, and when it is due; no state if its record has expired. A job that
-- is nowhere else is taken to be in the line, because looking there would cost a walk through all of it.
local function state_of(id)
  for line, state in pairs({ [COMPLETED] = STATE.completed, [FAILED] = STATE.failed }) do
    if redis.call('SISMEMBER', line, id) == 1 then
      local expires = expiry(line, id)
      if expires and expires <= now then
        return nil
      end
      return line == FAILED and is_cancelled(id) and STATE.cancelled or state
    end
  end
  local score = redis.call('ZSCORE', DELAYED, id)
  if score then
    local due = math.floor(tonumber(score) / SCALE)
    local found = fields(id, 'failedReason', 'attemptsMade') or {}
    local later_state = (found[1] or whole(found[2]) > 0) and STATE.failing or STATE.scheduled
    return due <= now and STATE.queued or later_state, due
  end
  return redis.call('LPOS', ACTIVE, id) and STATE.processing or STATE.queued
end

-- Tell whether there is such a job. Node leaves hashes behind that have nothing of a job but a delay or a mark.
local function exists(id)
  return redis.pcall('HEXISTS', P .. id, 'data') == 1
end

-- Tell whether somebody has the lock of the job, and then note that in `locked`.
local function is_locked(id, locked)
  if redis.call('EXISTS', P .. id .. ':lock') == 0 then
    return false
  end
  locked[#locked + 1] = id
  return true
end

-- Return the first of the ids a job may have that exists, and the job's state.
local function find(ids)
  for _, id in ipairs(ids) do
    if exists(id) then
      local state, due = state_of(id)
      if state then
        return id, state, due
      end
    end
  end
end

local function leave_line(id)
  return redis.call('LREM', WAIT, -1, id) + redis.call('LREM', PAUSED, -1, id)
end

-- What is no hash is no job, even if its id is in a line: an id may be the name of a key of the queue.
local function delete(id)
  if redis.call('TYPE', P .. id).ok == 'hash' then
    redis.call('DEL', P .. id)
  end
  unlock(id)
end

local function forget(id)
  delete(id)
  for _, line in ipairs({ COMPLETED, FAILED }) do
    redis.call('SREM', line, id)
    redis.call('ZREM', ENDED[line], id)
  end
  redis.call('ZREM', CANCELLED, id)
end

-- Take the job out of its line, or void its claim, so that nobody runs it.
local function take(id, state)
  if state == STATE.processing then
    redis.call('LREM', ACTIVE, 0, id)
    request_cancel(id)
  elseif redis.call('ZREM', DELAYED, id) == 0 then
    redis.call('LREM', WAIT, 0, id)
    redis.call('LREM', PAUSED, 0, id)
  end
  unlock(id)
end

-- The job ends; without `keep` it leaves nothing. `changes` are fields and values, `event` what is told if not the obvious.
local function conclude(id, line, keep, changes, extra, event)
  changes[#changes + 1] = 'workers:finished'
  changes[#changes + 1] = string.format('%.0f', now)
  local expires = string.format('%.0f', now + keep)
  if keep < FOREVER then
    changes[#changes + 1] = 'workers:expires'
    changes[#changes + 1] = expires
  end
  redis.call('HMSET', P .. id, unpack(changes))
  tell(event or line == COMPLETED and EVENT.completed or EVENT.failed, id)
  emit(line == COMPLETED and 'completed' or 'failed', id, extra)
  unlock(id)
  if keep == 0 then
    redis.call('DEL', P .. id)
    return
  end
  redis.call('SADD', line, id)
  if keep < FOREVER then
    local some = ends[line]
    some[#some + 1] = expires
    some[#some + 1] = id
  end
end

-- The job ends as a failed one to Node, with a reason and the facts of ours about it.
local function stop(id, keep, made, stalls, reason, facts, changes)
  for _, value in ipairs({ 'failedReason', reason, 'workers:error', facts, STOPPED, stopped_at(made, stalls) }) do
    changes[#changes + 1] = value
  end
  redis.call('HDEL', P .. id, 'lockAcquired', 'workers:cancel')
  conclude(id, FAILED, keep, changes, '{}', EVENT.cancelled)
  if keep > 0 then
    redis.call('ZADD', CANCELLED, string.format('%.0f', now + keep), id)
  end
end

-- Return the stacks of earlier failures and one more, as JSON; cut to the last one when they grow too long.
local function with_stack(stacks, one)
  local before = stacks and #stacks < STACKS_BYTES and json(stacks, nil) and string.match(stacks, '^%s*%[(.*)%]%s*$') or ''
  return '[' .. (string.find(before, '%S') and before .. ',' or '') .. one .. ']'
end
