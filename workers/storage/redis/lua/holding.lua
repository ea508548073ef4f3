-- Limits and fair keys, where jobs have such keys; see `workers/limits.py` and `../../memory/lines.py`. They begin with
-- \30. GATES has `limits`, all of them packed by name, each `{interval or 0, capacity, concurrency or 0, version, rate,
-- burst}`; `slowest`, the longest interval; `late`, if fair jobs may come due; and `F<key><name>`, the member of the front
-- of a fair key. PASSING has `<key in text()><id>` for each running job of a limit, FILLING the keys by when their bucket
-- is full, and OPENING those that have parked jobs by when they open.
--
-- The functions are made only where there are GATES, because each costs every run of a script. `declare` makes them.
if limited then
  local function make_holding()
    local holding, limits, healed, fresh = {}, nil, {}, {}

    local function is_fair(key)
      return string.sub(key, 1, 2) == '\30F'
    end

    function holding.limits()
      if not limits then
        local packed = redis.call('HGET', GATES, 'limits')
        local good, found = pcall(cmsgpack.unpack, packed or '')
        limits = packed and good and type(found) == 'table' and found or {}
      end
      return limits
    end

    local function limit_of(key)
      local name = key == QUEUE_KEY and '*' or string.match(key, '^\30L([^\31]*)\31')
      return name and holding.limits()[name]
    end

    -- Forget jobs that no worker runs any more, although nobody said so.
    local function heal(key, prefix)
      if healed[key] then
        return
      end
      healed[key] = true
      for _, value in ipairs(redis.call('ZRANGEBYLEX', PASSING, '[' .. prefix, '(' .. prefix .. '\255')) do
        local id = string.sub(value, #prefix + 1)
        if not fresh[id] and not redis.call('ZSCORE', LEASES, id) then
          redis.call('ZREM', PASSING, value)
        end
      end
    end

    -- Return how many jobs may run at the same time beside those that do.
    local function slots_left(key, limit, pending)
      if limit[3] == 0 then
        return math.huge
      elseif key == QUEUE_KEY then
        return limit[3] - redis.call('ZCARD', LEASES) - (pending or 0)
      end
      local prefix = text(key)
      local count = function()
        return limit[3] - redis.call('ZLEXCOUNT', PASSING, '[' .. prefix, '(' .. prefix .. '\255')
      end
      local left = count()
      if left <= 0 then
        heal(key, prefix)
        left = count()
      end
      return left
    end

    -- Return how many jobs of the key may start now; if none, when it opens, or nothing if another job has to end.
    function holding.room(key)
      local limit = limit_of(key)
      if not limit then
        return math.huge
      end
      local left = slots_left(key, limit)
      if left <= 0 or limit[1] == 0 then
        return math.max(left, 0)
      end
      local interval, empty = limit[1], now + limit[2] * limit[1]
      local full = tonumber(redis.call('ZSCORE', FILLING, key)) or now
      if full > empty then -- the clock was set back
        full = empty
        redis.call('ZADD', FILLING, full, key)
      end
      local tokens = math.floor((empty - math.max(full, now)) / interval)
      return math.min(left, tokens), full - (limit[2] - 1) * interval
    end

    -- Let `count` jobs pass, or the one of this id.
    function holding.pass(key, id, count)
      if id and not is_fair(key) then
        fresh[id] = true
        redis.call('ZADD', PASSING, 0, text(key) .. id)
      end
      local limit = limit_of(key)
      if limit and limit[1] > 0 then
        local full = tonumber(redis.call('ZSCORE', FILLING, key)) or now
        redis.call('ZADD', FILLING, math.max(full, now) + (count or 1) * limit[1], key)
      end
    end

    function holding.ended(key, id)
      if not is_fair(key) then
        redis.call('ZREM', PASSING, text(key) .. id)
      end
    end

    function holding.park(key, standing, opens)
      redis.call('ZADD', HELD, 0, text(key) .. standing)
      if opens then
        redis.call('ZADD', OPENING, opens, key)
      end
    end

    local function front_field(key, name)
      return 'F' .. text(key) .. text(name)
    end

    -- The member of the fair key's front, nothing if none is ready.
    function holding.front(key, name)
      local front = redis.call('HGET', GATES, front_field(key, name))
      return front and redis.call('ZSCORE', READY, front) and front
    end

    function holding.no_front(key, name, standing)
      local field = front_field(key, name)
      if not standing or redis.call('HGET', GATES, field) == standing then
        redis.call('HDEL', GATES, field)
      end
    end

    -- Put a job that is ready into the right line; returns whether it can be claimed there. A more urgent one takes the
    -- place of its fair key's front.
    function holding.stand(key, name, standing)
      if is_fair(key) then
        local front = holding.front(key, name)
        local first = front and read_member(front)
        if first and first.priority <= read_member(standing).priority then
          redis.call('ZADD', HELD, 0, text(key) .. standing)
          return false
        elseif front then
          redis.call('ZREM', READY, front)
          redis.call('ZADD', HELD, 0, text(key) .. front)
        end
        redis.call('HSET', GATES, front_field(key, name), standing)
      end
      redis.call('ZADD', READY, 0, standing)
      return true
    end

    -- Put a new job into the right line; returns true if the caller is to do that, nothing if it cannot be claimed there.
    function holding.lines_up(key, name, standing, delay)
      if delay > 0 then
        holding.is_late(key)
      elseif is_fair(key) then
        return holding.stand(key, name, standing) and 'ready' or nil
      end
      return true
    end

    -- Note that the job will come due.
    function holding.is_late(key)
      if is_fair(key) then
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
    local function bring_forward(key, name)
      local prefix = text(key)
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
          redis.call('HSET', GATES, front_field(key, name), standing)
          redis.call('ZADD', READY, 0, standing)
          wake(first.name)
          return true
        end
      end
    end

    -- Let the first `count` parked jobs of each name come up.
    local function release(key, count)
      local prefix = text(key)
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
          if is_fair(key) then
            if not holding.front(key, first.name) then
              bring_forward(key, first.name)
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

    -- Let parked jobs come up, because a job has ended, the key has opened, or its limit is another one.
    function holding.free(key)
      local limit = limit_of(key)
      if not limit or slots_left(key, limit) > 0 then
        release(key, 1)
      end
    end

    -- Let the next come up after a job has passed; returns whether some did. At most `wanted` of each name.
    function holding.next(key, name, wanted)
      if is_fair(key) then
        holding.no_front(key, name)
        return bring_forward(key, name)
      end
      local prefix = text(key)
      if not redis.call('ZRANGEBYLEX', HELD, '[' .. prefix, '(' .. prefix .. '\255', 'LIMIT', 0, 1)[1] then
        return false
      end
      local room, opens = holding.room(key)
      if room > 0 then
        return release(key, math.max(1, math.min(room, wanted)))
      elseif opens then
        redis.call('ZADD', OPENING, opens, key)
      end
      return false
    end

    -- Let jobs come up whose key has opened.
    function holding.open(limit)
      local opened = redis.call('ZRANGEBYSCORE', OPENING, '-inf', now, 'LIMIT', 0, limit)
      local slowest = tonumber(redis.call('HGET', GATES, 'slowest') or '0') or 0
      for _, key in ipairs(redis.call('ZRANGEBYSCORE', OPENING, '(' .. string.format('%.0f', now + slowest), '+inf', 'LIMIT', 0, limit)) do
        opened[#opened + 1] = key -- the clock was set back
      end
      batched('ZREM', OPENING, opened)
      for _, key in ipairs(opened) do
        holding.free(key)
      end
    end

    -- Look at the parked jobs of a limit that is another one now.
    function holding.look_again(name)
      if name == '*' then
        return wake_everybody()
      end
      local from = '['
      while true do
        -- Keys have different lengths, which come first in the line: so each length is looked at.
        local held = redis.call('ZRANGEBYLEX', HELD, from == '[' and '-' or from, '+', 'LIMIT', 0, 1)[1]
        if not held then
          return
        end
        local key = read_held(held) or ''
        if string.sub(key, 1, #name + 3) == '\30L' .. name .. '\31' then
          holding.free(key)
        end
        from = '(' .. text(key) .. '\255'
      end
    end

    return holding
  end

  local made
  holding = function()
    made = made or make_holding()
    return made
  end
end
