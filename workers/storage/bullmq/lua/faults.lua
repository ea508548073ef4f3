-- What would make BullMQ's scripts stop half-way: a job whose id is the name of a key, or whose key is no hash, or whose
-- counters are no whole numbers. Behind `kinds`.
local NAMED = 'its id is the name of a key of BullMQ'
local reserved = { [''] = true, ['de'] = true, ['dn'] = true, ['metrics'] = true, ['priority'] = true, ['added'] = true,
  ['workers'] = true }
for name in pairs(KINDS) do
  reserved[name] = true
end

local function is_whole(text)
  return text == '0' or (#text <= 16 and string.match(text, '^-?[1-9]%d*$') ~= nil)
end

-- Return what is wrong with the job of this id, nothing if it is sound; `prefix` is that of the queue's keys.
local function fault_of(prefix, id)
  if reserved[id] or string.sub(id, 1, 8) == 'workers:' then
    return NAMED
  end
  local found = redis.pcall('HMGET', prefix .. id, 'ats', 'atm', 'stc')
  if found.err then
    return 'its key is a ' .. redis.call('TYPE', prefix .. id).ok .. ', not a hash'
  end
  for at, name in ipairs({ 'ats', 'atm', 'stc' }) do
    if found[at] and not is_whole(found[at]) then
      return 'its field `' .. name .. '` is no whole number'
    end
  end
end
