-- In front of BullMQ's moveToFinished, whose keys and arguments these are.
local broken = damage(ARGV[7], { 'wait', 'active', 'prioritized', 'stalled', 'events', 'meta', ARGV[5] })
if broken then
  return broken
end

-- Any producer may have written what a job says of its parent in a flow, and of its deduplication. BullMQ would stop
-- half-way, each time anew, at values it cannot use. So such a job fails, and then has no parent and no such key.
local function is_one_of(key, kind)
  local found = redis.call('TYPE', key).ok
  return found == 'none' or found == kind
end

local PARENTS_LINES = { 'wait', 'active', 'prioritized', 'delayed', 'waiting-children', 'failed', 'events', 'marker', 'meta', 'pc' }
local function is_parent(text, key)
  local good, parent = pcall(cjson.decode, text)
  if not good or type(parent) ~= 'table' or type(parent.id) ~= 'string' or type(parent.queueKey) ~= 'string' then
    return false
  end
  for _, one in ipairs({ parent.queueKey .. ':' .. parent.id, key }) do
    if not (is_one_of(one, 'hash') and is_one_of(one .. ':dependencies', 'set') and is_one_of(one .. ':processed', 'hash')
      and is_one_of(one .. ':failed', 'hash') and is_one_of(one .. ':unsuccessful', 'zset')) then
      return false
    end
  end
  broken = damage(parent.queueKey .. ':', PARENTS_LINES)
  return true
end

local said = redis.call('HMGET', KEYS[12], 'parent', 'parentKey', 'deid')
local unfit = {}
if said[1] and not is_parent(said[1], said[2] or '') then
  unfit = { 'parent', 'parentKey' }
end
if broken then
  return broken
end
if said[3] and not (is_one_of(ARGV[7] .. 'de:' .. said[3], 'string') and is_one_of(ARGV[7] .. 'dn:' .. said[3], 'hash')) then
  unfit[#unfit + 1] = 'deid'
end
if #unfit > 0 then
  if ARGV[5] == 'completed' then
    return redis.error_reply('UNFIT its field `' .. unfit[1] .. '` is nothing that BullMQ can use')
  end
  redis.call('HDEL', KEYS[12], unpack(unfit))
end
