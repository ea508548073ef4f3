-- Remove waiting jobs. ARGV[5]: limit. Answers how many were removed.
local left = tonumber(ARGV[5])
local function gone(ids)
  for _, id in ipairs(ids) do
    delete(id)
  end
  left = left - #ids
end
for _, line in ipairs({ WAIT, PAUSED }) do
  local ids = left > 0 and redis.call('LRANGE', line, -left, -1) or {}
  if #ids > 0 then
    redis.call('LTRIM', line, 0, -(#ids + 1))
    gone(ids)
  end
end
local ids = left > 0 and redis.call('ZRANGE', DELAYED, 0, left - 1) or {}
batched('ZREM', DELAYED, ids)
gone(ids)
finish()
return tonumber(ARGV[5]) - left
