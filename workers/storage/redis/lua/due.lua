-- Return the fair keys of those that have some, by their number.
local function fair_keys(line, due)
  local found, ids = {}, {}
  if redis.call('HEXISTS', GATES, 'late') == 0 then
    return found
  end
  for at, value in ipairs(due) do
    ids[at] = id_in(line, value)
  end
  local records = fetch(JOBS, ids)
  for at = 1, #due do
    local job = read_job(records[at])
    found[at] = job and string.sub(job.key, 1, 2) == '\30F' and job.key or nil
  end
  return found
end

-- Make due jobs ready, at least `limit` of them, in the order in which they became due.
local function ready_what_is_due(limit)
  for _, line in ipairs({ SCHEDULED, FAILING }) do
    local due = redis.call('ZRANGEBYSCORE', line, '-inf', now, 'LIMIT', 0, limit)
    if #due > 0 then
      local fair = limited and fair_keys(line, due) or {}
      local standing = {}
      for at, value in ipairs(due) do
        local read = read_member(value)
        if fair[at] and read then
          if holding().stand(fair[at], read.name, value) then
            wake(read.name)
          end
        else
          standing[#standing + 1] = 0
          standing[#standing + 1] = value
          if read then
            wake(read.name)
          end
        end
      end
      batched('ZREM', line, due)
      batched('ZADD', READY, standing)
    end
  end
  if limited then
    holding().open(limit)
  end
end
