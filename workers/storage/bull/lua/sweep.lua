-- Remove expired records. ARGV[5]: limit, [6]: how long a worker is listed, in ms. Answers how many were removed.
local left = tonumber(ARGV[5])
local function over(key, until_ms)
  local some = left > 0 and redis.call('ZRANGEBYSCORE', key, '-inf', string.format('%.0f', until_ms), 'LIMIT', 0, left) or {}
  left = left - #some
  return some
end
for line, key in pairs(ENDED) do
  local expired = over(key, now)
  for _, id in ipairs(expired) do
    if expiry(line, id) and redis.call('SREM', line, id) == 1 then
      redis.call('DEL', P .. id)
    end
  end
  batched('ZREM', key, expired)
  batched('ZREM', CANCELLED, line == FAILED and expired or {})
end
batched('ZREM', CANCELLED, over(CANCELLED, now))
batched('ZREM', SEEN, over(SEEN, now - tonumber(ARGV[6])))
return tonumber(ARGV[5]) - left
