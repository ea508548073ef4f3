-- The beginning of every script that works on the queue: how records and lines are written, and what is announced at
-- the end.

-- A wrong type found in the middle of a step would leave the step half done, so the types are checked first.
local marked, followed, limited = false, false, false
for at = 1, #KEPT do
  local found = redis.call('TYPE', KEPT[at]).ok
  if found ~= 'none' then
    if found ~= kind_of(at) then
      return damaged(foreign(KEPT[at], kind_of(at)))
    end
    marked = marked or at == HASHES
    limited = limited or at == HASHES - 1
    followed = at == #KEPT
  end
end
if followed then
  local broken = foreign(WAITING, 'zset') or foreign(AFTER, 'hash')
  if broken then
    return damaged(broken)
  end
end

if limited then
  local broken = foreign(PASSING, 'zset') or foreign(FILLING, 'zset') or foreign(OPENING, 'zset')
  if broken then
    return damaged(broken)
  end
end

-- The jobs that have ended in this step where some have dependents, each `{id, state or 0 for none, error of a failed
-- one, result of a completed one}`, and what dependents.lua does about them.
local ended, stop_following, tell_dependents = {}

local END_OF = { [STATE.completed] = EVENT.completed, [STATE.failed] = EVENT.failed, [STATE.cancelled] = EVENT.cancelled }
-- After these an id may be used anew.
local STARTS_ANEW = { [STATE.failed] = true, [STATE.cancelled] = true }
local LINE_OF = { [STATE.completed] = COMPLETED, [STATE.failed] = FAILED, [STATE.cancelled] = CANCELLED }

local MINUTE, HOUR = 60 * 1000000, 3600 * 1000000

local function fetch(key, ids)
  local found = {}
  for start = 1, #ids, AT_ONCE do
    local stop = math.min(start + AT_ONCE - 1, #ids)
    local values = redis.call('HMGET', key, unpack(ids, start, stop))
    for at = 1, stop - start + 1 do
      found[start + at - 1] = values[at]
    end
  end
  return found
end

-- Records. A job's record is written once for each link of its chain: first HEAD, which is version, place, created,
-- priority, max attempts, keep completed, keep failed, name and ordering key; in a LINKED one the number of the link;
-- then the length of back-off and metadata, these, and the payload, which only clients read.
local PLAIN, LINKED = 1, 2
local HEAD = '>BI8I8I4I4I8I8I2c0I2c0'
local FORMATS = { [PLAIN] = HEAD, [LINKED] = HEAD .. 'I4' }

-- A priority above the default, which is below 0, has 2^31 added in a record. In a line, where no priority has a sign
-- either, such a job stands under a name of its own, URGENT and its name, and has ABOVE added. No job is called so, because
-- that is no UTF-8.
local URGENT, ABOVE = '\255', 1000

local function signed(priority)
  return priority >= 2 ^ 30 and priority - 2 ^ 31 or priority
end

local function read_job(record)
  local format = record and FORMATS[string.byte(record)]
  if not format then
    return nil
  end
  local good, _, place, created, priority, max_attempts, keep_completed, keep_failed, name, key, link, finish =
    pcall(struct.unpack, format, record)
  if not good then
    return nil
  end
  return {
    place = place, created = created, priority = signed(priority), max_attempts = max_attempts, keep_completed = keep_completed,
    keep_failed = keep_failed, name = name, key = key, link = finish and link or 0, finish = finish or link, -- where there is no link it comes last
  }
end

local function write_job(version, place, created, rest)
  return struct.pack('>BI8I8', version, place, created) .. rest
end

-- What changes is kept beside it, in the run, which is missing as long as nothing has changed: state, flags (1: cancel
-- requested, 2: there is progress), attempts, stalls, uncounted retries, place, finished, expires, token, worker,
-- error, progress, result. As long as the job has not completed, the place of the result has its failed attempts instead,
-- as in `workers/storage/failures.py`.
local RUN = '>BBI4I4I2I8I8I8c14I2c0I4c0'
local NO_TOKEN = string.rep('\0', 14)

local function fresh_run(place)
  return {
    state = STATE.queued, cancel = 0, attempts = 0, stalls = 0, uncounted = 0, place = place,
    finished = 0, expires = 0, token = NO_TOKEN, worker = '', error = '', result = '',
  }
end

local function read_run(record)
  local good, state, flags, attempts, stalls, uncounted, place, finished, expires, token, worker, fault, finish =
    pcall(struct.unpack, RUN, record)
  local progress
  if good and flags >= 2 then
    good, progress, finish = pcall(struct.unpack, '>I2c0', record, finish)
  end
  if not good then
    return nil
  end
  return {
    state = state, cancel = flags % 2, attempts = attempts, stalls = stalls, uncounted = uncounted, place = place,
    finished = finished, expires = expires, token = token, worker = worker, error = fault, progress = progress, finish = finish,
    result = string.sub(record, finish),
  }
end

local function write_run(run)
  local progress = run.progress and struct.pack('>I2', #run.progress) .. run.progress or ''
  return struct.pack(
    RUN, run.state, run.cancel + (run.progress and 2 or 0), run.attempts, run.stalls, run.uncounted, run.place, run.finished, run.expires,
    run.token, #run.worker, run.worker, #run.error, run.error
  ) .. progress .. run.result
end

-- Lines. A member contains its place and its job's id, so that no line needs to look a job up. In READY all scores are
-- 0, and members are ordered by name (`line` below), priority, place; HELD has the ordering key in front of that. In
-- SCHEDULED and FAILING the score is the place, which is when the job is due.
local function text(value)
  return struct.pack('>I2', #value) .. value
end

local function member(name, priority, place, id)
  if priority < 0 then
    name, priority = URGENT .. name, priority + ABOVE
  end
  return text(name) .. struct.pack('>I4I8', priority, place) .. id
end

local function read_member(value)
  local good, line, priority, place, finish = pcall(struct.unpack, '>I2c0I4I8', value)
  if not good then
    return nil
  end
  local name = line
  if string.byte(line) == 255 then
    name, priority = string.sub(line, 2), priority - ABOVE
  end
  return {
    name = name, priority = signed(priority), place = place, id = string.sub(value, finish), member = value, line = line,
  }
end

-- Split a member of HELD: its ordering key, and the member that would be in READY.
local function read_held(value)
  local good, key, finish = pcall(struct.unpack, '>I2c0', value)
  if good then
    return key, string.sub(value, finish)
  end
end

-- Return the id of a member of a line; nothing for a member that is not ours.
local function id_in(line, value)
  if line == HELD then
    local _, rest = read_held(value)
    value = rest or ''
  elseif line ~= READY and line ~= SCHEDULED and line ~= FAILING then
    return value
  end
  local read = read_member(value)
  return read and read.id or ''
end

-- As long as a job may run, DEPENDENTS also has how those ended that it came after: behind an id of no bytes, which no job
-- has, its own id and that of the other, all in text(), then a byte for the state, 0 for none, and the error of a failed
-- one; or '1' and the result of a completed one, or '0' for a result too large to be copied.
local function told_to(id)
  return text('') .. text(id)
end

local function forget_told(id)
  if followed then
    local prefix = told_to(id)
    redis.call('ZREMRANGEBYLEX', DEPENDENTS, '[' .. prefix, '(' .. prefix .. '\255')
  end
end

-- Places grow by at least one for each job, even if the clock stands still or goes back: first come, first served.
local last_place
local function next_place()
  if not last_place then
    last_place = tonumber(redis.call('HGET', META, 'place') or '0') or 0
    if not (last_place < 2 ^ 53) then -- not a number that we wrote
      last_place = 0
    end
  end
  last_place = math.max(last_place + 1, now)
  return last_place
end

-- A server whose memory is full stops a script at its first write, if that needs memory, and never after that. So this
-- stands in front of a write that needs none.
local function need_room()
  redis.call('HSETNX', META, 'place', '0')
end

local woken, waking, waking_all = {}, false, false
local function wake(name)
  woken[name] = true
  waking = true
end
local function wake_everybody()
  waking_all = true
end

-- What holding.lua does about limits and fair keys: the keys that begin with this byte. Where there are no GATES, they are
-- taken for ordering keys.
local RESERVED = 30
local holding

-- Tell the worker of the job to look.
local function request_cancel(id)
  tell(EVENT.cancel_requested, id)
  redis.pcall('PUBLISH', BASE .. ':cancels@' .. ARGV[1], id)
end

-- Delete what is to go, and write what has ended, in one call of each kind for a whole batch. A step that may meet such an
-- id again must call this first.
local forgotten, unleased, concluded, emptied, lined = {}, {}, {}, {}, {}
local function push(values, first, second)
  values[#values + 1] = first
  values[#values + 1] = second
end

local function flush()
  if not (forgotten[1] or unleased[1] or concluded[1]) then
    return
  end
  for _, id in ipairs(forgotten) do
    forget_told(id)
  end
  batched('HDEL', JOBS, forgotten)
  batched('HDEL', RUNS, forgotten)
  batched('ZREM', LEASES, unleased)
  batched('HSET', RUNS, concluded)
  batched('HSET', JOBS, emptied)
  for line, values in pairs(lined) do
    batched('ZADD', line, values)
  end
  forgotten, unleased, concluded, emptied, lined = {}, {}, {}, {}, {}
end

-- The last step about what has ended.
local function close()
  if #ended > 0 then
    tell_dependents()
  end
  flush()
end

-- The last step of every script that changes something. A user who may not publish (ACL) has changed it all the same:
-- others find that as they look, and `examination.py` tells of it.
local function finish()
  close()
  if last_place then
    redis.call('HSET', META, 'place', string.format('%.0f', last_place))
  end
  if waking_all then
    redis.call('DEL', SLEEPERS)
    redis.pcall('PUBLISH', BASE .. ':wake@' .. ARGV[1], cmsgpack.pack({}))
  elseif waking then
    -- Sleepers stay noted until somebody wakes them; then they look, and note themselves again before they sleep on.
    local names = {}
    for name in pairs(woken) do
      names[#names + 1] = name
    end
    if redis.call('HDEL', SLEEPERS, '*', unpack(names, 1, math.min(#names, AT_ONCE))) > 0 then
      redis.pcall('PUBLISH', BASE .. ':wake@' .. ARGV[1], cmsgpack.pack(names))
    end
  end
  if #events > 0 then
    redis.pcall('PUBLISH', BASE .. ':events@' .. ARGV[1], cmsgpack.pack(events))
  end
end

local function line_up(job, place, id)
  local standing = member(job.name, job.priority, place, id)
  if not limited or string.byte(job.key) ~= RESERVED then
    redis.call('ZADD', READY, 0, standing)
  elseif not holding().stand(job.key, job.name, standing) then
    return
  end
  wake(job.name)
end

-- Make one held job of each name ready for an ordering key, unless a job of the key is processing.
local function free(key)
  if limited and string.byte(key) == RESERVED then
    return holding().free(key)
  end
  local prefix = text(key)
  local from = '[' .. prefix
  while true do
    local held = redis.call('ZRANGEBYLEX', HELD, from, '(' .. prefix .. '\255', 'LIMIT', 0, 1)[1]
    if not held then
      return
    end
    local first = read_member(string.sub(held, #prefix + 1))
    redis.call('ZREM', HELD, held)
    if first then
      redis.call('ZADD', READY, 0, first.member)
      wake(first.name)
      from = '(' .. prefix .. text(first.line) .. '\255'
    end
  end
end

-- Free a key whose job has vanished without a lease.
local function is_busy(key)
  local holder = redis.call('HGET', BUSY, key)
  return holder and redis.call('ZSCORE', LEASES, holder) and true or false
end

local function step_out(job, place, id)
  local standing = member(job.name, job.priority, place, id)
  redis.call('ZREM', READY, standing)
  redis.call('ZREM', SCHEDULED, standing)
  redis.call('ZREM', FAILING, standing)
  if job.key ~= '' then
    redis.call('ZREM', HELD, text(job.key) .. standing)
    if limited and string.byte(job.key) == RESERVED then
      holding().no_front(job.key, job.name, standing)
    end
    if not is_busy(job.key) then
      free(job.key)
    end
  end
end

local function forget(id, line)
  forgotten[#forgotten + 1] = id
  if line then
    redis.call('ZREM', line, id)
  end
end

-- The job as it stands now: its record, its run (one without changes if there is none) and its public state; nil for an
-- unknown or expired id.
local function find(id, record, packed)
  local job = read_job(record)
  if not job then
    return nil
  end
  local run = not packed and fresh_run(job.place) or read_run(packed)
  if not run then
    return nil
  end
  local state = run.state
  if LINE_OF[state] and run.expires <= now then
    return nil
  end
  if not packed and job.place > job.created then
    state = STATE.scheduled
  end
  if (state == STATE.scheduled or state == STATE.failing) and run.place <= now then
    state = STATE.queued
  end
  return { job = job, run = run, state = state }
end

local function lookup(id)
  flush()
  local record = redis.call('HGET', JOBS, id)
  return record and find(id, record, redis.call('HGET', RUNS, id)) or nil, record
end

-- Deduplication keys. In MARKS, `K<key>` has `{mode, until, id}`, and `I<id>`, for each job that has to release a key,
-- the mode and the key. THROTTLED has the keys by when they are free.
local SIMPLE, THROTTLE, DEBOUNCE = 1, 2, 3

-- Release the job's key; with `mode`, only a key of that mode. Costs nothing where there are no keys.
local function unmark(id, mode)
  local held = marked and redis.call('HGET', MARKS, 'I' .. id)
  if held and (not mode or string.byte(held) == mode) then
    redis.call('HDEL', MARKS, 'I' .. id, 'K' .. string.sub(held, 2))
  end
end

-- In a message of events RESULT, and a result, stand in front of the end that this is the result of, where its record
-- may be gone before anybody looks. A larger result is kept for a minute at least, if at all.
local RESULT, TOLD_BYTES = 9, 4096

-- End the job in `state`; without `keep` nothing is left of it.
local function conclude(id, record, job, run, state, keep)
  unmark(id)
  run.state, run.cancel, run.worker, run.finished = state, 0, '', now
  if keep == 0 then
    forget(id)
  else
    run.expires = now + keep
    push(concluded, id, write_run(run))
    lined[LINE_OF[state]] = lined[LINE_OF[state]] or {}
    push(lined[LINE_OF[state]], run.expires, id)
    if state == STATE.completed then
      forget_told(id)
      local good, _, payload = pcall(struct.unpack, '>I2c0', record, job.finish)
      push(emptied, id, string.sub(record, 1, (good and payload or job.finish) - 1))
    end
  end
  if state == STATE.completed and keep < MINUTE and #run.result <= TOLD_BYTES then
    tell(RESULT, run.result)
  end
  tell(END_OF[state], id)
  if followed then
    ended[#ended + 1] = { id, state, state == STATE.failed and run.error or nil, run.result }
  end
end

-- End an attempt: the lease and the key are free.
local function let_go(id, job)
  unleased[#unleased + 1] = id
  if limited and holding().limits()['*'] then
    wake_everybody()
  end
  if job.key ~= '' then
    if limited and string.byte(job.key) == RESERVED then
      holding().ended(job.key, id)
    else
      redis.call('HDEL', BUSY, job.key)
    end
    free(job.key)
  end
end

-- Take the job out of its line, or void its claim.
local function take(id, job, run)
  if run.state == STATE.processing then
    let_go(id, job)
    request_cancel(id)
  elseif run.state == STATE.waiting then
    redis.call('ZREM', WAITING, id)
    if followed then
      stop_following(id)
    end
  else
    step_out(job, run.place, id)
  end
end
