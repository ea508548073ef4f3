-- Take an id without a job out of the line. What is at its key is set aside, unless it is a hash or a key of the queue.
local broken = fault(QUARANTINE, 'hash')
if broken then
  return redis.error_reply(broken)
end

local function is_name(id)
  for _, keys in pairs(KINDS) do
    for _, key in ipairs(keys) do
      if key == P .. id then
        return true
      end
    end
  end
  return string.sub(id, 1, 8) == 'workers:'
end

local dropped = {}
local function drop(id)
  local found = redis.call('TYPE', P .. id).ok
  if found == 'none' or found == 'hash' or is_name(id) then
    dropped[#dropped + 1] = id
  else
    write_down(id, 'its key is a ' .. found .. ', not a hash', put_away(P .. id, id))
  end
end
