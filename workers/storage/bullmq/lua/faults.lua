-- What would make BullMQ's scripts stop half-way: a job whose id is the name of a key, or whose key is no hash, or whose
-- counters are no whole numbers. Behind `kinds`.
local NAMED, LONGEST_NAME = 'its id is the name of a key of BullMQ', 16
local COUNTERS = { ats = true, atm = true, stc = true }
local reserved

local function is_reserved(id)
  if string.sub(id, 1, 8) == 'workers:' then
    return true
  elseif #id > LONGEST_NAME or string.find(id, '^%d') then
    return false
  elseif not reserved then
    reserved = { [''] = true, ['de'] = true, ['dn'] = true, ['metrics'] = true, ['priority'] = true, ['added'] = true,
      ['workers'] = true }
    for name in pairs(KINDS) do
      reserved[name] = true
    end
  end
  return reserved[id]
end

local function is_whole(text)
  return text == '0' or (#text <= 16 and string.match(text, '^-?[1-9]%d*$') ~= nil)
end

-- Return what is wrong with the fields of a job, as HGETALL answers them; nothing if they are sound.
local function fault_in(fields)
  for at = 1, #fields, 2 do
    local name = fields[at]
    if COUNTERS[name] and not is_whole(fields[at + 1]) then
      return 'its field `' .. name .. '` is no whole number'
    end
  end
end

-- Return what is wrong with the job of this id, nothing if it is sound; `prefix` is that of the queue's keys.
local function fault_of(prefix, id)
  if is_reserved(id) then
    return NAMED
  end
  local found = redis.pcall('HMGET', prefix .. id, 'ats', 'atm', 'stc')
  if found.err then
    return 'its key is a ' .. redis.call('TYPE', prefix .. id).ok .. ', not a hash'
  end
  return fault_in({ 'ats', found[1] or '0', 'atm', found[2] or '0', 'stc', found[3] or '0' })
end
