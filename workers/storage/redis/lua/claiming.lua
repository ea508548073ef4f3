-- Claim for a worker up to `limit` jobs; of which names, and with which leases, says `wanted`: `{default lease or 0, name,
-- lease, ...}`. The token of the n-th claim is the 12 random bytes of `secret` and n in two bytes. Returns `{id, record,
-- attempt, lease, error, ...}`. The caller has made sure that QUARANTINE is a hash.
local DUE_AT_ONCE, READ_AT_ONCE, HELD_ROUNDS, ENOUGH_BYTES = 500, 100, 8, 8 * 1024 * 1024

local function claim_for(worker, secret, limit, wanted)
  redis.call('ZADD', WORKERS, now, worker)
  if redis.call('HEXISTS', META, 'paused') == 1 then
    return {}
  end
  local leases, default_lease = {}, wanted[1]
  for at = 2, #wanted, 2 do
    leases[wanted[at]] = wanted[at + 1]
  end
  ready_what_is_due(math.max(limit, DUE_AT_ONCE))
  local whole_queue = limited and holding().limits()['*']
  if whole_queue then
    limit = math.min(limit, (holding().room(QUEUE_KEY)))
  end

  local function of_name(name, count)
    local prefix = text(name)
    return redis.call('ZRANGEBYLEX', READY, '[' .. prefix, '(' .. prefix .. '\255', 'LIMIT', 0, count)
  end

  -- Return the first ready jobs of each wanted name.
  local function heads(count)
    local lines = {}
    if default_lease == 0 then
      for name in pairs(leases) do
        for _, called in ipairs({ URGENT .. name, name }) do
          local line = of_name(called, count)
          if #line > 0 then
            lines[#lines + 1] = line
          end
        end
      end
      return lines
    end
    local from = '-'
    while true do
      local some = redis.call('ZRANGEBYLEX', READY, from, '+', 'LIMIT', 0, count)
      local first = some[1] and read_member(some[1])
      if first then -- those of its name are all in front
        local range = text(first.line)
        local last = #some
        while string.sub(some[last], 1, #range) ~= range do
          some[last], last = nil, last - 1
        end
        lines[#lines + 1] = some
        from = '(' .. range .. '\255'
      elseif some[1] then
        redis.call('ZREM', READY, some[1]) -- not ours: no job of ours has such a member
      else
        return lines
      end
    end
  end

  -- Return the first ready jobs of all wanted names.
  local function candidates(count)
    local merged = {}
    local lines = heads(count)
    for _, line in ipairs(lines) do
      for _, value in ipairs(line) do
        merged[#merged + 1] = read_member(value)
      end
    end
    if #lines > 1 then
      table.sort(merged, function(a, b)
        if a.priority ~= b.priority then
          return a.priority < b.priority
        end
        return a.place < b.place
      end)
    end
    return merged, #lines > 1 and math.min(count, #merged) or #merged
  end

  local answer, taken, bytes = {}, 0, 0
  local runs, deadlines, granted, came_up = {}, {}, {}, false

  -- Tell whether the job of this key may start, or park it.
  local function passes(one, key)
    if string.sub(key, 2, 2) == 'F' then
      local front = holding().front(key, one.name)
      if not front or front == one.member then
        return true
      end
      holding().park(key, one.member)
      return false
    end
    local room, opens = holding().room(key)
    if room <= 0 then
      holding().park(key, one.member, opens)
    end
    return room > 0
  end

  local function grant(one, record, job, run)
    local lease = leases[one.name] or default_lease
    taken = taken + 1
    run.state, run.attempts, run.worker = STATE.processing, run.attempts + 1, worker
    run.token = secret .. struct.pack('>I2', taken)
    run.finished, run.expires = 0, 0
    runs[#runs + 1] = one.id
    runs[#runs + 1] = write_run(run)
    deadlines[#deadlines + 1] = now + lease
    deadlines[#deadlines + 1] = one.id
    if limited and string.byte(job.key) == RESERVED then
      holding().pass(job.key, one.id)
      came_up = holding().next(job.key, one.name, limit - taken) or came_up
    elseif job.key ~= '' then
      redis.call('HSET', BUSY, job.key, one.id)
      granted[job.key] = true
    end
    answer[#answer + 1] = one.id
    answer[#answer + 1] = record
    answer[#answer + 1] = run.attempts
    answer[#answer + 1] = lease
    answer[#answer + 1] = run.error
    bytes = bytes + #record + #run.error
    unmark(one.id, DEBOUNCE)
    tell(EVENT.active, one.id)
  end

  -- Take jobs that may run and hold those that may not; returns whether it held any.
  local function sort_out(line, count)
    local ids, gone, aside = {}, {}, false
    for at = 1, count do
      ids[at] = line[at].id
    end
    local records, packed = fetch(JOBS, ids), fetch(RUNS, ids)
    for at = 1, count do
      if bytes > ENOUGH_BYTES or taken >= limit then
        break
      end
      local one = line[at]
      local job, run = read_job(records[at]), packed[at] and read_run(packed[at])
      gone[#gone + 1] = one.member
      if not job or (packed[at] and not run) then
        set_aside(one.id, one.name, one.priority, one.place, records[at], packed[at])
        aside = true
      elseif (run or job).place ~= one.place or (run and (run.state == STATE.processing or LINE_OF[run.state])) then
        aside = true -- the job has left this place; a second member must not run it twice
      elseif limited and string.byte(job.key) == RESERVED then
        if passes(one, job.key) then
          grant(one, records[at], job, run or fresh_run(one.place))
        else
          aside = true
        end
      elseif job.key ~= '' and (granted[job.key] or is_busy(job.key)) then
        redis.call('ZADD', HELD, 0, text(job.key) .. one.member)
        aside = true
      else
        grant(one, records[at], job, run or fresh_run(one.place))
      end
    end
    batched('ZREM', READY, gone)
    return aside
  end

  local rounds = 0
  while taken < limit and rounds < HELD_ROUNDS and bytes <= ENOUGH_BYTES do
    local line, count = candidates(rounds > 0 and READ_AT_ONCE or math.min(limit - taken, READ_AT_ONCE))
    if count == 0 then
      break
    end
    came_up = false
    if sort_out(line, count) and not came_up then
      rounds = rounds + 1
    end
  end
  if whole_queue and taken > 0 then
    holding().pass(QUEUE_KEY, nil, taken)
  end
  batched('HSET', RUNS, runs)
  batched('ZADD', LEASES, deadlines)
  return answer
end
