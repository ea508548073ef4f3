-- Where the part of a job's record begins that `write_job` takes as it is.
local REST = struct.size('>BI8I8') + 1

-- The job that waits has the payload of the new one, which is the last `size` bytes of it, and waits as long.
local function debounce(id, record, known, new, size)
  local job, run = known.job, known.run
  local _, start = struct.unpack('>I2c0', record, job.finish)
  local place, rest = next_place() + new[5], new[7]
  local payload = string.sub(rest, #rest - size + 1)
  step_out(job, run.place, id)
  redis.call('HSET', JOBS, id, write_job(string.byte(record), place, job.created, string.sub(record, REST, start - 1) .. payload))
  run.state, run.place = STATE.scheduled, place
  redis.call('HSET', RUNS, id, write_run(run))
  redis.call('ZADD', SCHEDULED, place, member(job.name, job.priority, place, id))
  wake(job.name)
end

local function read_mark(key)
  local packed = redis.call('HGET', MARKS, 'K' .. key)
  local good, mark = pcall(cmsgpack.unpack, packed or '')
  return packed and good and type(mark) == 'table' and mark or nil
end

local function set_mark(key, mode, ttl, id, delay)
  marked = true
  redis.call('HSET', MARKS, 'K' .. key, cmsgpack.pack({ mode, now + delay + ttl, id }))
  if mode == THROTTLE then
    redis.call('ZADD', THROTTLED, now + delay + ttl, key)
  else
    redis.call('HSET', MARKS, 'I' .. id, string.char(mode) .. key)
  end
end

-- The state of the job that has the new one's key, and its id; nothing if the key was free, and is the new one's now.
local function take_key(new, added)
  local id, delay = new[1], new[5]
  local key, mode, ttl, size = unpack(new[8])
  local mark = read_mark(key)
  if mark then
    local known, record = lookup(mark[3])
    local state = added[mark[3]] and added[mark[3]][1] or known and known.state
    local throttled = mark[1] == THROTTLE
    if throttled and mark[2] > now or not throttled and state and not LINE_OF[state] then
      if mark[1] == DEBOUNCE and mode == DEBOUNCE then
        debounce(mark[3], record, known, new, size)
        state = STATE.scheduled
      end
      return { state or 0, false, mark[3] }
    end
    redis.call('HDEL', MARKS, 'I' .. mark[3])
    redis.call('ZREM', THROTTLED, key)
  end
  set_mark(key, mode, ttl, id, delay)
end

-- New jobs, each `{id, name, key, priority, delay, version, rest of the record}`, and of those with a deduplication key
-- `{key, mode, time, size of the payload}` behind that; those that share one are a group. Answers for each what was
-- found: nothing (it was added), or the state, with the result of a completed job, or the id of the job that has the key.
local function add(jobs)
  flush()
  local ids, found, groups = {}, {}, {}
  for at, new in ipairs(jobs) do
    ids[at] = new[1]
    if new[8] then
      redis.call('ZCARD', THROTTLED) -- raises a wrong type before anything is written
    end
  end
  local records = fetch(JOBS, ids)
  local values, ready, scheduled, added = {}, {}, {}, {}
  for at, new in ipairs(jobs) do
    local id, name, key, priority, delay, version, rest = unpack(new)
    local old = added[id]
    if not old and records[at] then
      local packed = redis.call('HGET', RUNS, id)
      local known = find(id, records[at], packed)
      if known and known.state ~= STATE.failed then
        old = { known.state, known.state == STATE.completed and known.run.result or nil }
      end
    end
    if not old and new[8] then
      local dedup = new[8][1]
      if groups[dedup] ~= false then -- of several payloads that replace one, the last stays
        groups[dedup] = take_key(new, added) or false
      end
      old = groups[dedup]
    end
    if not old and records[at] then
      if redis.call('HDEL', RUNS, id) == 1 then
        redis.call('ZREM', CANCELLED, id)
        redis.call('ZREM', COMPLETED, id)
        redis.call('ZREM', FAILED, id)
      end
    end
    if old then
      found[at] = old
    else
      local created = next_place()
      local place = created + delay
      values[#values + 1] = id
      values[#values + 1] = write_job(version, place, created, rest)
      local line = delay > 0 and scheduled or ready
      line[#line + 1] = delay > 0 and place or 0
      line[#line + 1] = member(name, priority, place, id)
      added[id] = { delay > 0 and STATE.scheduled or STATE.queued }
      found[at] = 0
      wake(name)
      tell(EVENT.queued, id)
    end
  end
  batched('HSET', JOBS, values)
  batched('ZADD', READY, ready)
  batched('ZADD', SCHEDULED, scheduled)
  return found
end
