-- New jobs, each `{id, name, key, priority, delay, version, rest of the record}`. Answers for each what was found:
-- nothing (it was added), or the state, with the result of a completed job.
local function add(jobs)
  flush()
  local ids, found = {}, {}
  for at, new in ipairs(jobs) do
    ids[at] = new[1]
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
      elseif packed then
        redis.call('HDEL', RUNS, id)
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
