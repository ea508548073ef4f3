-- Add new jobs, each `{id, name, key, priority, delay, version, rest of the record}`. A job with a deduplication key
-- has `{key, mode, time, size of the payload}` after that; jobs with the same key are a group. Then come the jobs that a
-- job follows, for after.lua, whose `follow` is given if there are some. Answers for each job
-- what was found: nothing (it was added), or the state, with the result of a completed job, or with the id of the job
-- that has the key. `take_key` is that of marks.lua if some jobs may have keys.
local function add(jobs, take_key, follow)
  flush()
  local ids, found, groups = {}, {}, {}
  for at, new in ipairs(jobs) do
    ids[at] = new[1]
    if new[8] then
      redis.call('ZCARD', THROTTLED) -- raises, if the type is wrong, before anything is written
    end
  end
  local records = fetch(JOBS, ids)
  local values, ready, scheduled, added, failed = {}, {}, {}, {}, {}
  for at, new in ipairs(jobs) do
    local id, name, key, priority, delay, version, rest = unpack(new)
    local old = added[id]
    if not old and records[at] then
      local packed = redis.call('HGET', RUNS, id)
      local known = find(id, records[at], packed)
      if known and not STARTS_ANEW[known.state] then
        old = { known.state, known.state == STATE.completed and known.run.result or nil }
      end
    end
    if not old and new[8] then
      local dedup = new[8][1]
      if groups[dedup] ~= false then -- of several payloads that replace one, the last counts
        groups[dedup] = take_key(new, added) or false
      end
      old = groups[dedup]
    end
    if not old and records[at] then
      need_room()
      forget_told(id)
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
      local state, fault
      if new[9] then
        state, fault = follow(new, added, created, place)
      end
      if not state then
        local line, standing = delay > 0 and scheduled or ready, member(name, priority, place, id)
        local passes = not limited or string.byte(key) ~= RESERVED or holding().lines_up(key, name, standing, delay)
        if passes == true then
          line[#line + 1] = delay > 0 and place or 0
          line[#line + 1] = standing
        end
        if passes then
          wake(name)
        end
      end
      added[id] = { state or delay > 0 and STATE.scheduled or STATE.queued }
      if fault then
        added[id].fault = fault
        failed[#failed + 1] = { id, values[#values], fault, place }
      end
      found[at] = 0
      tell(EVENT.queued, id)
    end
  end
  batched('HSET', JOBS, values)
  batched('ZADD', READY, ready)
  batched('ZADD', SCHEDULED, scheduled)
  for _, one in ipairs(failed) do
    local job, run = read_job(one[2]), fresh_run(one[4])
    run.error = one[3]
    conclude(one[1], one[2], job, run, STATE.failed, job.keep_failed)
  end
  return found
end
