-- Return these fields of some of the queue's jobs, `{fields, ...}`: of the first and the last in each of its lines.
local function sample(prefix, ...)
  local MOST, found, seen = 25, {}, {}
  for _, line in ipairs({ 'wait', 'paused', 'active', 'delayed', 'priority', 'prioritized', 'completed', 'failed' }) do
    local read = redis.call('TYPE', prefix .. line).ok == 'list' and 'LRANGE' or 'ZRANGE'
    for _, part in ipairs({ { 0, MOST - 1 }, { -MOST, -1 } }) do
      local ids = redis.pcall(read, prefix .. line, part[1], part[2])
      for _, id in ipairs(ids.err and {} or ids) do
        local job = not seen[id] and redis.pcall('HMGET', prefix .. id, ...)
        if job and not job.err then
          found[#found + 1] = job
        end
        seen[id] = true
      end
    end
  end
  return found
end
