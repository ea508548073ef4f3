-- ARGV[2]: limit. Answers how many waiting jobs are gone; fewer than the limit means all.
local left = tonumber(ARGV[2])
local keys = {}
for _, line in ipairs({ READY, HELD, SCHEDULED, FAILING }) do
  local standing = left > 0 and redis.call('ZRANGE', line, 0, left - 1) or {}
  local ids = {}
  for at, value in ipairs(standing) do
    local start = line == HELD and 3 + struct.unpack('>I2', value) or 1
    local read = read_member(string.sub(value, start))
    ids[at] = read and read.id or ''
    if line == HELD then
      keys[struct.unpack('>I2c0', value)] = true
    end
  end
  for at, record in ipairs(fetch(JOBS, ids)) do
    local job = read_job(record)
    if job and job.key ~= '' then
      keys[job.key] = true
    end
  end
  batched('HDEL', JOBS, ids)
  batched('HDEL', RUNS, ids)
  batched('ZREM', line, standing)
  left = left - #standing
end
for key in pairs(keys) do
  if redis.call('HEXISTS', BUSY, key) == 0 then
    free(key)
  end
end
finish()
return tonumber(ARGV[2]) - left
