-- Set aside what would make BullMQ's scripts stop half-way, before they run: jobs whose id is the name of a key, jobs
-- whose key is no hash, and jobs whose counters are no whole numbers.
-- Answers `{{id, why, ...}, damage}`: what was set aside, and a key of the wrong type, '' for none.
local MOST, RECORDS, DUE_AT_ONCE = 1000, 100, 1000
local call, try = redis.call, redis.pcall
local JOB_FIELDS = {
  'name', 'data', 'opts', 'timestamp', 'delay', 'priority', 'parentKey', 'parent', 'rjk', 'deid', 'ats', 'atm', 'stc', 'pb',
  'processedOn', 'finishedOn', 'returnvalue', 'failedReason', 'stacktrace', 'progress', 'defa',
}

-- Move the fields of a job that are among BullMQ's own, which stay, to quarantine; return the type they had.
local function take_out_of_meta()
  local place = QUARANTINE .. ':meta'
  for at, value in ipairs(call('HMGET', P .. 'meta', unpack(JOB_FIELDS))) do
    if value then
      call('HSET', place, JOB_FIELDS[at], value)
    end
  end
  return call('HDEL', P .. 'meta', unpack(JOB_FIELDS)) > 0 and 'hash' or ''
end

local function set_aside(id, why)
  local kept = ''
  if id == 'meta' and not foreign(P .. id, 'hash') then
    kept = take_out_of_meta()
  elseif not KINDS[id] or foreign(P .. id, KINDS[id]) then
    kept = put_away(P .. id, id)
  end
  call('DEL', P .. id .. ':lock')
  write_down(id, why, kept)
end

-- Set aside those of `ids` that have a fault, and take them out of their lines.
local function examine(ids, ...)
  for _, id in ipairs(ids) do
    local why = #told < 2 * MOST and fault_of(P, id)
    if why then
      for _, line in ipairs({ ... }) do
        if KINDS[line] == 'list' then
          call('LREM', P .. line, -1, id)
        else
          call(KINDS[line] == 'set' and 'SREM' or 'ZREM', P .. line, id)
        end
      end
      set_aside(id, why)
    end
  end
end

local function is_job(key)
  return call('HEXISTS', key, 'timestamp') == 1 and call('HEXISTS', key, 'data') == 1
end

-- A job of this name has its hash where the queue needs its key.
local function evict(name)
  for _, line in ipairs({ 'wait', 'paused', 'active' }) do
    try('LREM', P .. line, 0, name)
  end
  for _, line in ipairs({ 'delayed', 'prioritized' }) do
    try('ZREM', P .. line, name)
  end
  set_aside(name, NAMED)
end

-- Return what is wrong with the queue itself, `{{name of a key, why, field}, ...}`. Jobs in the place of keys are set
-- aside.
local function damaged()
  local found = {}
  for name, kind in pairs(KINDS) do
    local is = call('TYPE', P .. name).ok
    if is == 'hash' and kind ~= 'hash' and is_job(P .. name) then
      evict(name)
    elseif is ~= 'none' and is ~= kind then
      found[#found + 1] = { name, foreign(P .. name, kind) }
    end
  end
  for _, name in ipairs({ 'id', 'pc', 'limiter' }) do
    local value = try('GET', P .. name)
    if type(value) == 'string' and not is_whole(value) then
      found[#found + 1] = { name, P .. name .. ' holds no whole number' }
    end
  end
  for field, number in pairs({ concurrency = '', max = '', duration = '', ['opts.maxLenEvents'] = '^%d+$' }) do
    local value = try('HGET', P .. 'meta', field)
    if type(value) == 'string' and not (tonumber(value) and string.find(value, number)) then
      found[#found + 1] = { 'meta', P .. 'meta: `' .. field .. '` is no number', field }
    end
  end
  return found
end

-- Set aside what is in the way of the queue, and delete fields that lack their number.
local function repair(damages)
  for _, each in ipairs(damages) do
    local name, why, field = unpack(each)
    if field then
      call('HDEL', P .. name, field)
      told[#told + 1] = name
      told[#told + 1] = why
    else
      clear_away(P .. name, name, why)
    end
    if name == 'id' then -- so that ids of existing jobs are not given out again
      call('SET', P .. 'id', string.format('%.0f', at_ms))
    end
  end
end

local function examine_what_is_claimed()
  local due = string.format('%.0f', (at_ms + 1) * 0x1000 - 1)
  examine(call('ZRANGEBYSCORE', P .. 'delayed', 0, due, 'LIMIT', 0, claims * DUE_AT_ONCE), 'delayed')
  local before
  repeat
    before = #told
    examine(call('LRANGE', P .. 'wait', -claims, -1), 'wait')
    examine(call('ZRANGE', P .. 'prioritized', 0, claims - 1), 'prioritized')
  until #told == before or #told >= 2 * MOST
end

local owned = next_owned_by_bull(P)
if owned then
  return owned
end

-- Before anything else, because everything else is noted there.
if claims < 0 and damage(P, { 'workers:quarantine' }) then
  call('RENAME', P .. 'workers:quarantine', QUARANTINE .. ':workers:quarantine')
end
local broken = damage(P, { 'workers:quarantine' })
if broken then
  return broken
end

local damages = damaged()
if claims < 0 then
  told = {}
  repair(damages)
  damages = {}
elseif #damages == 0 and claims > 0 then
  examine_what_is_claimed()
elseif #damages == 0 then
  examine(call('SMEMBERS', P .. 'stalled'), 'active', 'stalled')
  examine(call('ZRANGE', P .. 'completed', 0, RECORDS - 1), 'completed')
  examine(call('ZRANGE', P .. 'failed', 0, RECORDS - 1), 'failed')
end
return { told, damages[1] and damages[1][2] or '' }
