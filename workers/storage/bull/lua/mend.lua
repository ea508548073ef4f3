-- Set aside jobs in the place of the queue's keys; with ARGV[5] = 1, because somebody asked for it, other foreign keys
-- as well. Answers `{id, why, ...}`.
local repairing = ARGV[5] == '1'
local others = other_owner() or ended_elsewhere(COMPLETED) or ended_elsewhere(FAILED)
if others then
  return redis.error_reply(others)
end
if foreign(QUARANTINE, 'hash') then -- first, because everything else is noted there
  if not repairing then
    return redis.error_reply(fault(QUARANTINE, 'hash'))
  end
  clear_away(QUARANTINE, 'workers:quarantine', foreign(QUARANTINE, 'hash'))
end

local function is_job(key)
  local found = redis.pcall('HMGET', key, 'data', 'timestamp')
  return not found.err and found[1] and found[2]
end

local function evict(name)
  for _, line in ipairs({ WAIT, PAUSED, ACTIVE }) do
    redis.pcall('LREM', line, 0, name)
  end
  redis.pcall('ZREM', DELAYED, name)
  write_down(name, 'its id is the name of a key of Bull', put_away(P .. name, name))
  redis.call('DEL', P .. name .. ':lock')
end

for kind, keys in pairs(KINDS) do
  for _, key in ipairs(keys) do
    local why, name = foreign(key, kind), string.sub(key, #P + 1)
    if why and is_job(key) then
      evict(name)
    elseif why and repairing then
      clear_away(key, name, why)
    end
    if why and key == COUNTER and redis.call('EXISTS', key) == 0 then
      redis.call('SET', COUNTER, string.format('%.0f', at_ms)) -- so that ids of existing jobs are not given out again
    end
  end
end
if repairing and counter_fault() then
  clear_away(COUNTER, 'id', P .. 'id holds no number')
  redis.call('SET', COUNTER, string.format('%.0f', at_ms))
end
return cmsgpack.pack(told)
