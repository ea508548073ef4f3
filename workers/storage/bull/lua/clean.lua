-- Remove those of the jobs that ended longer ago than the age. ARGV[5]: `completed` or `failed`, [6]: age in ms,
-- [7]: limit, [8]: `{ids}`. Answers how many were removed. Of a job that Node ended, only its beginning is known.
local line, before = P .. ARGV[5], now - tonumber(ARGV[6])
local left = tonumber(ARGV[7])
for _, id in ipairs(cmsgpack.unpack(ARGV[8])) do
  local found = left > 0 and redis.call('SISMEMBER', line, id) == 1
    and (fields(id, 'workers:finished', 'timestamp') or {})
  local expires = found and expiry(line, id)
  local expired = expires and expires <= now -- counts as gone already
  if found and not expired and whole(found[1] or found[2]) <= before then
    forget(id)
    left = left - 1
  end
end
finish()
return tonumber(ARGV[7]) - left
