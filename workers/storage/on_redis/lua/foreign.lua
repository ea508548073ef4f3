-- Return what is wrong with a key of the queue; nothing if its type is right, or if it does not exist.
local function foreign(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= 'none' and found ~= kind then
    return key .. ' is a ' .. found .. ', not a ' .. kind
  end
end
