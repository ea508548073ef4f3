-- Functions to add jobs, each `{id, name, data, opts, attempts, delay in microseconds, lifo}`; `opts` is JSON.
-- Scripts that add check that first, so that nothing is added halfway.
local broken_counter = counter_fault()

-- Return the number of the job: the next one, or its id if that is a number, which then must not be given out again.
local function number_of(id)
  if not string.find(id, '^%d+$') then
    return redis.call('INCR', COUNTER)
  elseif tonumber(id) > tonumber(redis.call('GET', COUNTER) or 0) then
    redis.call('SET', COUNTER, id)
  end
  return tonumber(id)
end

-- 0 if there is no such job, else the state it is in, and its result, or no state where none can be. A failed,
-- cancelled or expired one makes room.
local function existing(id)
  local kind = redis.call('TYPE', P .. id).ok
  if kind == 'none' then
    return 0
  elseif kind ~= 'hash' then
    return { 0 }
  end
  if not exists(id) then
    redis.call('DEL', P .. id)
    return 0
  end
  local state = state_of(id)
  if state == STATE.completed then
    local found = fields(id, 'returnvalue', 'workers:result')
    return { state, found[1], found[2] }
  elseif state and not starts_anew(state) then
    return { state }
  end
  forget(id)
  return 0
end

local some_cancelled = redis.call('EXISTS', CANCELLED) == 1
local function add(job)
  local id, name, data, opts, attempts, delay, lifo = unpack(job)
  local found = existing(id)
  if found ~= 0 then
    return found
  end
  local number = number_of(id)
  local eta = delay > 0 and later(delay) or now
  redis.call(
    'HMSET', P .. id, 'data', data, 'opts', opts, 'progress', '0', 'delay', milliseconds(delay), 'timestamp',
    string.format('%.0f', now), 'attempts', attempts, 'attemptsMade', '0', 'stacktrace', '[]', 'returnvalue', 'null', 'name', name
  )
  if some_cancelled then
    redis.call('ZREM', CANCELLED, id)
  end
  if delay > 0 then
    delay_until(eta, number % SCALE, id)
  elseif lifo then
    table.insert(in_front, 1, id)
  else
    line_up(id)
  end
  tell(EVENT.queued, id)
  emit('waiting', id)
  return 0
end
