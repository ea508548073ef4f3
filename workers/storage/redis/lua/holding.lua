-- Limits and fair keys, where jobs have such gates; see `workers/limits.py` and `../../memory/lines.py`. A gate is a
-- job's key that begins with \30. GATES has `limits`, all of them packed by name, each `{interval or 0, capacity,
-- concurrency or 0, version, rate, burst}`; `slowest`, the longest interval; `late`, if fair jobs may come due; and
-- `F<gate><name>`, the member of the front of a fair key. PASSING has `<gate in text()><id>` for each running job of a
-- limit, FILLING the gates by when their bucket is full, and OPENING those that jobs are parked at by when they open.
--
-- The functions are made only where there are GATES, because each costs every run of a script. `declare` makes them.
if gated then
  local function make_gates()
    local gates, limits, healed, fresh = {}, nil, {}, {}

    local function is_fair(gate)
      return string.sub(gate, 1, 2) == '\30F'
    end

    function gates.limits()
      if not limits then
        local packed = redis.call('HGET', GATES, 'limits')
        local good, found = pcall(cmsgpack.unpack, packed or '')
        limits = packed and good and type(found) == 'table' and found or {}
      end
      return limits
    end

    local function limit_of(gate)
      local name = gate == QUEUE_GATE and '*' or string.match(gate, '^\30L([^\31]*)\31')
      return name and gates.limits()[name]
    end

    -- Forget jobs that no worker runs any more, although nobody said so.
    local function heal(gate, prefix)
      if healed[gate] then
        return
      end
      healed[gate] = true
      for _, value in ipairs(redis.call('ZRANGEBYLEX', PASSING, '[' .. prefix, '(' .. prefix .. '\255')) do
        local id = string.sub(value, #prefix + 1)
        if not fresh[id] and not redis.call('ZSCORE', LEASES, id) then
          redis.call('ZREM', PASSING, value)
        end
      end
    end

    -- Return how many jobs may run at the same time beside those that do.
    local function places(gate, limit, pending)
      if limit[3] == 0 then
        return math.huge
      elseif gate == QUEUE_GATE then
        return limit[3] - redis.call('ZCARD', LEASES) - (pending or 0)
      end
      local prefix = text(gate)
      local count = function()
        return limit[3] - redis.call('ZLEXCOUNT', PASSING, '[' .. prefix, '(' .. prefix .. '\255')
      end
      local left = count()
      if left <= 0 then
        heal(gate, prefix)
        left = count()
      end
      return left
    end

    -- Return how many jobs may pass the gate now; if none, when it opens, or nothing if another job has to end.
    function gates.room(gate)
      local limit = limit_of(gate)
      if not limit then
        return math.huge
      end
      local left = places(gate, limit)
      if left <= 0 or limit[1] == 0 then
        return math.max(left, 0)
      end
      local interval, empty = limit[1], now + limit[2] * limit[1]
      local full = tonumber(redis.call('ZSCORE', FILLING, gate)) or now
      if full > empty then -- the clock was set back
        full = empty
        redis.call('ZADD', FILLING, full, gate)
      end
      local tokens = math.floor((empty - math.max(full, now)) / interval)
      return math.min(left, tokens), full - (limit[2] - 1) * interval
    end

    -- Let `count` jobs pass, or the one of this id.
    function gates.pass(gate, id, count)
      if id and not is_fair(gate) then
        fresh[id] = true
        redis.call('ZADD', PASSING, 0, text(gate) .. id)
      end
      local limit = limit_of(gate)
      if limit and limit[1] > 0 then
        local full = tonumber(redis.call('ZSCORE', FILLING, gate)) or now
        redis.call('ZADD', FILLING, math.max(full, now) + (count or 1) * limit[1], gate)
      end
    end

    function gates.ended(gate, id)
      if not is_fair(gate) then
        redis.call('ZREM', PASSING, text(gate) .. id)
      end
    end

    function gates.park(gate, standing, opens)
      redis.call('ZADD', HELD, 0, text(gate) .. standing)
      if opens then
        redis.call('ZADD', OPENING, opens, gate)
      end
    end

    local function front_field(gate, name)
      return 'F' .. text(gate) .. text(name)
    end

    -- The member of the fair key's front, nothing if none is ready.
    function gates.front(gate, name)
      local front = redis.call('HGET', GATES, front_field(gate, name))
      return front and redis.call('ZSCORE', READY, front) and front
    end

    function gates.no_front(gate, name, standing)
      local field = front_field(gate, name)
      if not standing or redis.call('HGET', GATES, field) == standing then
        redis.call('HDEL', GATES, field)
      end
    end

    -- Put a job that is ready into the right line; returns whether it can be claimed there. A more urgent one takes the
    -- place of its fair key's front.
    function gates.stand(gate, name, standing)
      if is_fair(gate) then
        local front = gates.front(gate, name)
        local first = front and read_member(front)
        if first and first.priority <= read_member(standing).priority then
          redis.call('ZADD', HELD, 0, text(gate) .. standing)
          return false
        elseif front then
          redis.call('ZREM', READY, front)
          redis.call('ZADD', HELD, 0, text(gate) .. front)
        end
        redis.call('HSET', GATES, front_field(gate, name), standing)
      end
      redis.call('ZADD', READY, 0, standing)
      return true
    end

    -- Put a new job into the right line; returns true if the caller is to do that, nothing if it cannot be claimed there.
    function gates.lines_up(gate, name, standing, delay)
      if delay > 0 then
        gates.is_late(gate)
      elseif is_fair(gate) then
        return gates.stand(gate, name, standing) and 'ready' or nil
      end
      return true
    end

    -- Note that the job will come due.
    function gates.is_late(gate)
      if is_fair(gate) then
        redis.call('HSET', GATES, 'late', 1)
      end
    end

    local function first_held(prefix, name)
      for _, line in ipairs({ URGENT .. name, name }) do
        local range = prefix .. text(line)
        local held = redis.call('ZRANGEBYLEX', HELD, '[' .. range, '(' .. range .. '\255', 'LIMIT', 0, 1)[1]
        if held then
          return held
        end
      end
    end

    -- Make the first parked job of the name the front, behind all that are ready.
    local function bring_forward(gate, name)
      local prefix = text(gate)
      while true do
        local held = first_held(prefix, name)
        if not held then
          return false
        end
        redis.call('ZREM', HELD, held)
        local first = read_member(string.sub(held, #prefix + 1))
        local packed = first and redis.call('HGET', RUNS, first.id)
        local run = first and (not packed and fresh_run(first.place) or read_run(packed))
        if run and run.place == first.place and run.state ~= STATE.processing and not LINE_OF[run.state] then
          run.state, run.place = STATE.queued, next_place()
          redis.call('HSET', RUNS, first.id, write_run(run))
          local standing = member(first.name, first.priority, run.place, first.id)
          redis.call('HSET', GATES, front_field(gate, name), standing)
          redis.call('ZADD', READY, 0, standing)
          wake(first.name)
          return true
        end
      end
    end

    -- Let the first `count` parked jobs of each name come up.
    local function release(gate, count)
      local prefix = text(gate)
      local from, released = '[' .. prefix, false
      while true do
        local held = redis.call('ZRANGEBYLEX', HELD, from, '(' .. prefix .. '\255', 'LIMIT', 0, 1)[1]
        if not held then
          return released
        end
        local first = read_member(string.sub(held, #prefix + 1))
        if not first then
          redis.call('ZREM', HELD, held)
        else
          local range = prefix .. text(first.line)
          if is_fair(gate) then
            if not gates.front(gate, first.name) then
              bring_forward(gate, first.name)
            end
          else
            local some = redis.call('ZRANGEBYLEX', HELD, '[' .. range, '(' .. range .. '\255', 'LIMIT', 0, count)
            local ready = {}
            for at, value in ipairs(some) do
              ready[2 * at - 1], ready[2 * at] = 0, string.sub(value, #prefix + 1)
            end
            batched('ZADD', READY, ready)
            batched('ZREM', HELD, some)
            wake(first.name)
          end
          released = true
          from = '(' .. range .. '\255'
        end
      end
    end

    -- Let parked jobs come up, because a job has ended, the gate has opened, or its limit is another one.
    function gates.free(gate)
      local limit = limit_of(gate)
      if not limit or places(gate, limit) > 0 then
        release(gate, 1)
      end
    end

    -- Let the next come up after a job has passed; returns whether some did. At most `wanted` of each name.
    function gates.next(gate, name, wanted)
      if is_fair(gate) then
        gates.no_front(gate, name)
        return bring_forward(gate, name)
      end
      local prefix = text(gate)
      if not redis.call('ZRANGEBYLEX', HELD, '[' .. prefix, '(' .. prefix .. '\255', 'LIMIT', 0, 1)[1] then
        return false
      end
      local room, opens = gates.room(gate)
      if room > 0 then
        return release(gate, math.max(1, math.min(room, wanted)))
      elseif opens then
        redis.call('ZADD', OPENING, opens, gate)
      end
      return false
    end

    -- Let jobs come up whose gate has opened.
    function gates.open(limit)
      local opened = redis.call('ZRANGEBYSCORE', OPENING, '-inf', now, 'LIMIT', 0, limit)
      local slowest = tonumber(redis.call('HGET', GATES, 'slowest') or '0') or 0
      for _, gate in ipairs(redis.call('ZRANGEBYSCORE', OPENING, '(' .. string.format('%.0f', now + slowest), '+inf', 'LIMIT', 0, limit)) do
        opened[#opened + 1] = gate -- the clock was set back
      end
      batched('ZREM', OPENING, opened)
      for _, gate in ipairs(opened) do
        gates.free(gate)
      end
    end

    -- Look at the parked jobs of a limit that is another one now.
    function gates.look_again(name)
      if name == '*' then
        return wake_everybody()
      end
      local from = '['
      while true do
        -- Gates have different lengths, which come first in the line: so each length is looked at.
        local held = redis.call('ZRANGEBYLEX', HELD, from == '[' and '-' or from, '+', 'LIMIT', 0, 1)[1]
        if not held then
          return
        end
        local gate = read_held(held) or ''
        if string.sub(gate, 1, #name + 3) == '\30L' .. name .. '\31' then
          gates.free(gate)
        end
        from = '(' .. text(gate) .. '\255'
      end
    end

    return gates
  end

  local made_gates
  gates = function()
    made_gates = made_gates or make_gates()
    return made_gates
  end
end
