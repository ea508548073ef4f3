-- Settlements, each `{id, token, kind, ...}`. ARGV[3] of the script: uncounted retries allowed in a row.
local APPLIED, ALREADY, TAKEN, OVER, UNKNOWN, CORRUPT = 0, 1, 2, 3, 4, 5
local COMPLETE, RETRY, FAIL, CONTINUE, STOP = 1, 2, 3, 5, 6

local function why_not(run, token)
  if run.token == token and run.state ~= STATE.processing then
    return ALREADY
  end
  if LINE_OF[run.state] and run.expires <= now then
    return UNKNOWN
  end
  return LINE_OF[run.state] and OVER or TAKEN
end

-- Tell whether the retry uses up the attempt.
local function count(run, counted, snoozed)
  if snoozed then
    return false
  end
  if counted or run.uncounted >= tonumber(ARGV[3]) then
    run.uncounted = 0
    return true
  end
  run.uncounted = run.uncounted + 1
  return false
end

local function put_back(id, job, run)
  run.state, run.cancel, run.worker = STATE.queued, 0, ''
  redis.call('HSET', RUNS, id, write_run(run))
  line_up(job, run.place, id)
end

-- A snooze is no failure: the job waits as before, with the error it has.
local function retry(id, record, job, run, delay, fault, counted, snoozed, noted)
  if count(run, counted, snoozed) then
    run.result = with_failure(run.result, noted, now / 1000)
    if not counted and run.attempts >= job.max_attempts then
      run.error = '\1' .. string.sub(fault, 2)
      return conclude(id, record, job, run, STATE.failed, job.keep_failed)
    end
  else
    run.attempts = run.attempts - 1
  end
  run.error, run.place = snoozed and run.error or fault, next_place() + delay
  if delay > 0 then
    local failed = run.error ~= ''
    run.state, run.cancel, run.worker = failed and STATE.failing or STATE.scheduled, 0, ''
    redis.call('HSET', RUNS, id, write_run(run))
    redis.call('ZADD', failed and FAILING or SCHEDULED, run.place, member(job.name, job.priority, run.place, id))
    if limited and string.byte(job.key) == RESERVED then
      holding().is_late(job.key)
    end
    wake(job.name)
  else
    put_back(id, job, run)
  end
  tell(snoozed and EVENT.queued or EVENT.failing, id)
end

local function apply(id, record, job, run, settlement)
  local kind = settlement[3]
  if kind == COMPLETE then
    run.result = settlement[5]
    conclude(id, record, job, run, STATE.completed, settlement[4])
  elseif kind == RETRY then
    retry(id, record, job, run, unpack(settlement, 4, 8))
  elseif kind == FAIL then
    run.error = settlement[5]
    run.result = with_failure(run.result, settlement[6], now / 1000)
    conclude(id, record, job, run, STATE.failed, settlement[4])
  elseif kind == STOP then
    conclude(id, record, job, run, STATE.cancelled, settlement[4])
  elseif kind == CONTINUE then
    continue(id, job, run, settlement[4])
  else
    run.attempts = run.attempts - 1
    put_back(id, job, run)
    tell(EVENT.queued, id)
  end
  let_go(id, job)
  if kind == COMPLETE and settlement[6] then
    add({ settlement[6] }, nil, follow)
  end
end

local function settle(settlement, packed, record)
  local id, token = settlement[1], settlement[2]
  local run = packed and read_run(packed)
  if not packed then
    return record and TAKEN or UNKNOWN
  elseif not run then
    return CORRUPT
  elseif run.token ~= token or run.state ~= STATE.processing then
    return why_not(run, token)
  end
  local job = read_job(record)
  if not job then
    return CORRUPT
  end
  apply(id, record, job, run, settlement)
  return APPLIED
end

-- Settle, and return a code for each; or nothing, and which key is damaged.
local function settle_all(settlements)
  need_room()
  local ids, met, outcomes = {}, {}, {}
  for at, settlement in ipairs(settlements) do
    ids[at] = settlement[1]
    local next = settlement[3] == COMPLETE and settlement[6] or settlement[3] == CONTINUE and settlement[4]
    if not end_of and next and next[9] then
      local broken = foreign(WAITING, 'zset') or foreign(AFTER, 'hash')
      if broken then
        return nil, broken
      end
      know_dependents()
    end
  end
  local runs, records = fetch(RUNS, ids), fetch(JOBS, ids)
  for at, settlement in ipairs(settlements) do
    local id = ids[at]
    if met[id] then -- what was read before may be outdated
      flush()
      runs[at], records[at] = redis.call('HGET', RUNS, id), redis.call('HGET', JOBS, id)
    end
    met[id] = true
    outcomes[at] = settle(settlement, runs[at], records[at])
    if settlement[6] and settlement[3] == COMPLETE then
      met[settlement[6][1]] = true
    end
  end
  return outcomes
end
