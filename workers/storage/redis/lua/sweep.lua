-- Remove expired records. ARGV[2]: limit, [3]: how long a worker is listed. Answers how many were removed.
local broken = foreign(THROTTLED, 'zset')
if broken then
  return damaged(broken)
end
local left = tonumber(ARGV[2])
local free_keys = left > 0 and redis.call('ZRANGEBYSCORE', THROTTLED, '-inf', now, 'LIMIT', 0, left) or {}
local fields = {}
for at, key in ipairs(free_keys) do
  fields[at] = 'K' .. key
end
batched('HDEL', MARKS, fields)
batched('ZREM', THROTTLED, free_keys)
left = left - #free_keys
for _, line in ipairs({ COMPLETED, FAILED, CANCELLED }) do
  local over = left > 0 and redis.call('ZRANGEBYSCORE', line, '-inf', now, 'LIMIT', 0, left) or {}
  for _, id in ipairs(over) do
    forget_told(id)
  end
  batched('HDEL', JOBS, over)
  batched('HDEL', RUNS, over)
  batched('ZREM', line, over)
  left = left - #over
end
if limited and left > 0 then
  local full = redis.call('ZRANGEBYSCORE', FILLING, '-inf', now, 'LIMIT', 0, left)
  batched('ZREM', FILLING, full)
  left = left - #full
end
local unseen = left > 0 and redis.call('ZRANGEBYSCORE', WORKERS, '-inf', now - tonumber(ARGV[3]), 'LIMIT', 0, left) or {}
if #unseen > 0 then
  local busy, gone = holders(), {}
  for _, worker in ipairs(unseen) do
    if not busy[worker] then
      gone[#gone + 1] = worker
    end
  end
  batched('ZREM', WORKERS, gone)
  left = left - #gone
end
return tonumber(ARGV[2]) - left
