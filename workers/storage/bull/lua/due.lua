-- Put due jobs into the line, in the order in which they became due, except those without a record. In a paused queue, too:
-- the timer of a Node process that starts later would put them into WAIT, which a `resume` of Node's overwrites.
local DUE_AT_ONCE = 1000

local function line_up_what_is_due(limit)
  local due = redis.call('ZRANGEBYSCORE', DELAYED, '-inf', '(' .. string.format('%.0f', (now + 1) * SCALE), 'LIMIT', 0, limit)
  if #due == 0 then
    return
  end
  batched('ZREM', DELAYED, due)
  local standing = {}
  for _, id in ipairs(due) do
    local found = fields(id, 'data')
    if found and found[1] then
      redis.call('HSET', P .. id, 'delay', '0')
      standing[#standing + 1] = id
    else
      drop(id)
    end
  end
  batched('LPUSH', LINE, standing)
  announce(standing)
  local first = redis.call('ZRANGE', DELAYED, 0, 0, 'WITHSCORES')[2]
  next_delayed = first and math.min(next_delayed or math.huge, tonumber(first)) or next_delayed
end
