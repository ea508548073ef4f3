-- The queue's keys. KEYS[1] is `<prefix>:<queue>:`; ARGV[1] the database's number, [2] the queue's name, [3] the
-- dialect of the Node processes, [4] our name to them. Times are milliseconds of the server's clock.
local P = KEYS[1]
local QUEUE, DIALECT, EMITTER = ARGV[2], ARGV[3], ARGV[4]
local WAIT, PAUSED, ACTIVE, DELAYED = P .. 'wait', P .. 'paused', P .. 'active', P .. 'delayed'
local COMPLETED, FAILED, COUNTER, META_PAUSED = P .. 'completed', P .. 'failed', P .. 'id', P .. 'meta-paused'
-- Ours, which Node does not know: ended jobs, and the cancelled ones among them, by when they expire, workers by when they
-- were last seen. CANCELLED may have ids that are cancelled no more: it only says where to look.
local ENDED = { [COMPLETED] = P .. 'workers:completed', [FAILED] = P .. 'workers:failed' }
local CANCELLED, SEEN, QUARANTINE = P .. 'workers:cancelled', P .. 'workers:seen', P .. 'workers:quarantine'

-- The types that the keys must have; QUARANTINE, a hash, is checked by the scripts that use it.
local KINDS = {
  list = { WAIT, PAUSED, ACTIVE }, set = { COMPLETED, FAILED }, string = { COUNTER, META_PAUSED },
  zset = { DELAYED, ENDED[COMPLETED], ENDED[FAILED], CANCELLED, SEEN },
}

-- What Bull 1 never has, and who does. Each record of Bull 1, and of ours, has `attempts`; one of Bull 1 has no name.
local OTHERS = {
  events = { 'stream', 'BullMQ, whose URL begins with bullmq+redis://' },
  priority = { 'zset' }, ['repeat'] = { 'zset' }, ['stalled-check'] = { 'string' },
}
local LATER = '; this queue is one of Bull 3 or newer: leave it to them, and take another name or prefix'
local LATER_JOB = 'FOREIGN ' .. P .. '... has jobs without `attempts`' .. LATER

local function is_later(name, attempts)
  return name and not attempts
end

-- Return the error that says whose queue this is, if a key is there that only another library makes.
local function other_owner()
  if redis.call('EXISTS', P .. 'events', P .. 'priority', P .. 'repeat', P .. 'stalled-check') == 0 then
    return
  end
  for name, other in pairs(OTHERS) do
    local kind, owner = unpack(other)
    if redis.call('TYPE', P .. name).ok == kind then
      return 'FOREIGN ' .. P .. name .. ' is a ' .. kind .. (owner and '; this queue is one of ' .. owner or LATER)
    end
  end
end

-- Return it for the set of ended jobs, which later versions keep in order.
local function ended_elsewhere(line)
  if redis.call('TYPE', line).ok == 'zset' then
    return 'FOREIGN ' .. line .. ' is a zset, not a set' .. LATER
  end
end

-- Return the error that says what is wrong with a key; nothing if its type is right, or if it does not exist.
local function fault(key, kind)
  local why = foreign(key, kind)
  if not why then
    return
  end
  return kind == 'set' and ended_elsewhere(key)
    or 'DAMAGED ' .. why .. '; this is no queue of Bull 1: remove what is there, or take another name or prefix'
end

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local at_ms = now

local function counter_fault()
  local counter = redis.pcall('GET', COUNTER)
  if type(counter) == 'string' and not (string.find(counter, '^%d+$') and #counter < 17) then
    return 'DAMAGED ' .. COUNTER .. ' is no number; set it to one that no id of this queue has reached'
  end
end
