-- Remove jobs that wait, first those that wait for others. ARGV[2]: limit. Answers how many were removed; fewer than the limit means all.
local broken = foreign(WAITING, 'zset')
if broken then
  return damaged(broken)
end
local left = tonumber(ARGV[2])
local keys = {}
for _, line in ipairs({ WAITING, READY, HELD, SCHEDULED, FAILING }) do
  local standing = left > 0 and redis.call('ZRANGE', line, 0, left - 1) or {}
  local ids = {}
  for at, value in ipairs(standing) do
    ids[at] = id_in(line, value)
    unmark(ids[at])
    forget_told(ids[at])
    if followed and line == WAITING then
      stop_following(ids[at])
    end
    if followed then
      ended[#ended + 1] = { ids[at], 0 }
    end
    if line == HELD then
      keys[read_held(value) or ''] = true
    end
  end
  for _, record in ipairs(fetch(JOBS, ids)) do
    local job = read_job(record)
    if job and job.key ~= '' then
      keys[job.key] = true
      if limited and string.byte(job.key) == RESERVED then
        holding().no_front(job.key, job.name)
      end
    end
  end
  batched('HDEL', JOBS, ids)
  batched('HDEL', RUNS, ids)
  batched('ZREM', line, standing)
  left = left - #standing
end
for key in pairs(keys) do
  if not is_busy(key) then
    free(key)
  end
end
finish()
return tonumber(ARGV[2]) - left
