-- Any producer may have written what a job says of its parent in a flow, and of its deduplication. BullMQ would stop
-- half-way, each time anew, at values it cannot use. So such a job fails, and then has no parent and no such key.
local function is_one_of(key, kind)
  local found = redis.call('TYPE', key).ok
  return found == 'none' or found == kind
end

-- Tell whether BullMQ can use what a job says of its parent, and return the error about that parent's queue.
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
  return true, damage(parent.queueKey .. ':',
    { 'wait', 'active', 'prioritized', 'delayed', 'waiting-children', 'failed', 'events', 'marker', 'meta', 'pc' })
end

-- Return the error for which a job cannot end as `target`; one that fails loses the fields that are to blame.
local function refusal(prefix, job, target)
  local said = redis.call('HMGET', job, 'parent', 'parentKey', 'deid')
  local unfit = {}
  if said[1] then
    local good, broken = is_parent(said[1], said[2] or '')
    if broken then
      return broken
    elseif not good then
      unfit = { 'parent', 'parentKey' }
    end
  end
  if said[3] and not (is_one_of(prefix .. 'de:' .. said[3], 'string') and is_one_of(prefix .. 'dn:' .. said[3], 'hash')) then
    unfit[#unfit + 1] = 'deid'
  end
  if #unfit > 0 then
    if target == 'completed' then
      return redis.error_reply('UNFIT its field `' .. unfit[1] .. '` is nothing that BullMQ can use')
    end
    redis.call('HDEL', job, unpack(unfit))
  end
end
