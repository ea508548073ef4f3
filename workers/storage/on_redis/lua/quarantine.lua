-- Note in the hash QUARANTINE what no worker can run, by its id: why, when, and the type of the key that was moved
-- there. The script before this defines QUARANTINE and `at_ms`, which is now.
local told = {}

local function write_down(id, why, kept)
  if kept ~= '' or redis.call('HEXISTS', QUARANTINE, id) == 0 then
    redis.call('HSET', QUARANTINE, id, cjson.encode({ why, at_ms, kept }))
  end
  told[#told + 1] = id
  told[#told + 1] = why
end

-- Move the key of a job to quarantine and returns its type. A lock belongs to another job, whatever this one is called.
local function put_away(key, id)
  local found = redis.call('TYPE', key).ok
  if found == 'none' or (found == 'string' and string.sub(id, -5) == ':lock') then
    return ''
  end
  redis.call('RENAME', key, QUARANTINE .. ':' .. id)
  return found
end

-- Set aside a key that is in the way of the queue's own, because somebody asked for it.
local function clear_away(key, name, why)
  redis.call('RENAME', key, QUARANTINE .. ':' .. name)
  write_down(name, why, 'moved')
end
