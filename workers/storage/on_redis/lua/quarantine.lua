-- What no worker can run is written down in the hash QUARANTINE, by its id: why, when, and what type had the key that lies
-- behind it. In front of this stand QUARANTINE and `at_ms`, which is now.
local told = {}

local function write_down(id, why, kept)
  if kept ~= '' or redis.call('HEXISTS', QUARANTINE, id) == 0 then
    redis.call('HSET', QUARANTINE, id, cjson.encode({ why, at_ms, kept }))
  end
  told[#told + 1] = id
  told[#told + 1] = why
end

-- The key of a job lies in quarantine; what type it had. A lock is another job's, whatever a job is called.
local function put_away(key, id)
  local found = redis.call('TYPE', key).ok
  if found == 'none' or (found == 'string' and string.sub(id, -5) == ':lock') then
    return ''
  end
  redis.call('RENAME', key, QUARANTINE .. ':' .. id)
  return found
end

-- A key that is in the way of the queue's own is set aside, because somebody asked for it.
local function clear_away(key, name, why)
  redis.call('RENAME', key, QUARANTINE .. ':' .. name)
  write_down(name, why, 'moved')
end
