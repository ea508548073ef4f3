-- What is wrong with a key of the queue; nothing where it is what it has to be, or not there.
local function foreign(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= 'none' and found ~= kind then
    return key .. ' is a ' .. found .. ', not a ' .. kind
  end
end
