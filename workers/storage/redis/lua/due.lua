-- Make due jobs ready, at least `limit` of them, in the order in which they became due.
local function ready_what_is_due(limit)
  for _, line in ipairs({ SCHEDULED, FAILING }) do
    local due = redis.call('ZRANGEBYSCORE', line, '-inf', now, 'LIMIT', 0, limit)
    if #due > 0 then
      local standing = {}
      for _, value in ipairs(due) do
        standing[#standing + 1] = 0
        standing[#standing + 1] = value
        local read = read_member(value)
        if read then
          wake(read.name)
        end
      end
      batched('ZREM', line, due)
      batched('ZADD', READY, standing)
    end
  end
end
