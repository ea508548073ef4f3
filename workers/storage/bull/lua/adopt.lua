-- Let records of our jobs that Node has ended expire too, from now on. ARGV[5]: `completed` or `failed`, [6]: `{ids}`.
local line = P .. ARGV[5]
local which = line == COMPLETED and 'keepCompleted' or 'keepFailed'
for _, id in ipairs(cmsgpack.unpack(ARGV[6])) do
  local found = not expiry(line, id) and fields(id, 'opts')
  local keep = found and found[1] and keep_of(options(found[1]), which) or FOREVER
  if keep < FOREVER and redis.call('SISMEMBER', line, id) == 1 then
    local expires = string.format('%.0f', now + keep)
    redis.call('HSET', P .. id, 'workers:expires', expires)
    redis.call('ZADD', ENDED[line], expires, id)
  end
end
