-- Jobs that follow others. DEPENDENTS has `<id in text()><id of a dependent>` for each job that a waiting one still
-- follows, with scores of 0, and what queue.lua says. In AFTER, `L<id>` counts these for each waiting job, and `A<id>` is a byte for what happens
-- when one does not complete, then the ids. WAITING has the waiting jobs by when they were enqueued. Both are empty when
-- DEPENDENTS is.
--
-- The functions are made only where they are needed, because each costs every run of a script.
local FAILS = 1
local BECAUSE_OF = '\3'
local CAUSE_BYTES = 1000
local COPIED_BYTES = 65536
local end_of, because_of, learn

local function know_dependents()
  -- Leave nothing of whom the job follows.
  stop_following = function(id)
    local packed = redis.call('HGET', AFTER, 'A' .. id)
    local good, others = pcall(cmsgpack.unpack, string.sub(packed or '', 2))
    if packed and good and type(others) == 'table' then
      local gone = {}
      for at, other in ipairs(others) do
        gone[at] = text(other) .. id
      end
      batched('ZREM', DEPENDENTS, gone)
    end
    redis.call('HDEL', AFTER, 'A' .. id, 'L' .. id)
    redis.call('ZREM', WAITING, id)
  end

  -- Return the state that a job has ended in, 0 if nobody knows it, nothing if it has not ended; then its error, and its
  -- result.
  end_of = function(id)
    flush()
    if redis.call('HEXISTS', JOBS, id) == 0 then
      return 0
    end
    local packed = redis.call('HGET', RUNS, id)
    local run = packed and read_run(packed)
    if not run or not LINE_OF[run.state] then
      return nil
    end
    if run.expires <= now then
      return 0
    end
    return run.state, run.error, run.result
  end

  -- Tell the job how another ended that it came after.
  learn = function(id, other, how, fault, result)
    local what = ''
    if how == STATE.completed then
      what = #result <= COPIED_BYTES and '1' .. result or '0'
    elseif how == STATE.failed then
      what = fault or ''
    end
    followed = true
    redis.call('ZADD', DEPENDENTS, 0, told_to(id) .. text(other) .. string.char(how) .. what)
  end

  -- Return the error of a job that follows `other`, with the beginning of that one's.
  because_of = function(other, how, fault)
    local kind, cause = string.sub(fault or '', 1, 1), ''
    if kind == BECAUSE_OF then
      cause = '\0' .. cmsgpack.pack({ 'DependencyFailed', '' })
    elseif kind == '\0' or kind == '\1' then
      local good, parts = pcall(cmsgpack.unpack, string.sub(fault, 2))
      if good and type(parts) == 'table' then
        cause = '\0' .. cmsgpack.pack({ tostring(parts[1]), string.sub(tostring(parts[2]), 1, CAUSE_BYTES) })
      end
    elseif kind ~= '' then
      cause = fault
    end
    return BECAUSE_OF .. cmsgpack.pack({ other, how, cause })
  end

  local function let_know(id, other, how, fault, result)
    learn(id, other, how, fault, result)
    local packed = how ~= STATE.completed and redis.call('HGET', AFTER, 'A' .. id)
    local fails = packed and string.byte(packed) == FAILS
    if not fails and redis.call('HINCRBY', AFTER, 'L' .. id, -1) > 0 then
      return
    end
    local found, record = lookup(id)
    stop_following(id)
    if not found or found.run.state ~= STATE.waiting then
      forget_told(id)
      return -- a version that knows of no dependents ended it
    end
    local job, run = found.job, found.run
    if fails then
      run.error = because_of(other, how, fault)
      conclude(id, record, job, run, STATE.failed, job.keep_failed)
      return
    end
    local delay = job.place - job.created
    run.place = next_place() + delay
    run.state = delay > 0 and STATE.scheduled or STATE.queued
    redis.call('HSET', RUNS, id, write_run(run))
    if delay == 0 then
      line_up(job, run.place, id)
    else
      redis.call('ZADD', SCHEDULED, run.place, member(job.name, job.priority, run.place, id))
      if limited and string.byte(job.key) == RESERVED then
        holding().is_late(job.key)
      end
      wake(job.name)
    end
    tell(EVENT.queued, id)
  end

  -- Release or fail those that follow what has ended, and those that follow these: a job that fails is added to `ended`.
  tell_dependents = function()
    local at = 1
    while at <= #ended do
      local other, how, fault, result = unpack(ended[at], 1, 4)
      local prefix = text(other)
      repeat
        local found = redis.call('ZRANGEBYLEX', DEPENDENTS, '[' .. prefix, '(' .. prefix .. '\255', 'LIMIT', 0, AT_ONCE)
        batched('ZREM', DEPENDENTS, found)
        for _, value in ipairs(found) do
          let_know(string.sub(value, #prefix + 1), other, how, fault, result)
        end
      until #found < AT_ONCE
      at = at + 1
    end
    ended = {}
  end
end

if followed then
  know_dependents()
end
