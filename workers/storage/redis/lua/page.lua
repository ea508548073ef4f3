-- Read a page. ARGV[2]: the line's name, [3]: its part (all, due or later), [4]: limit, [5] and [6]: score and member
-- after which to go on. Answers `{score, member}` after which to go on next time, nothing at the end of the line; then
-- the jobs, each with its id.
local line, part, limit = BASE .. ':' .. ARGV[2], ARGV[3], tonumber(ARGV[4])
local first, stop = 0, redis.call('ZCARD', line)
if part == 'due' then
  stop = redis.call('ZCOUNT', line, '-inf', now)
elseif part == 'later' then
  first = redis.call('ZCOUNT', line, '-inf', now)
end
if ARGV[5] then
  -- The member may have left: put it there for a moment to find its rank.
  local bookmark = ARGV[6] .. '\0\0cursor'
  redis.call('ZADD', line, ARGV[5], bookmark)
  first = math.max(first, redis.call('ZRANK', line, bookmark))
  redis.call('ZREM', line, bookmark)
end

local last = math.min(first + limit, stop) - 1
local standing = last >= first and redis.call('ZRANGE', line, first, last, 'WITHSCORES') or {}
local ids = {}
for at = 1, #standing, 2 do
  ids[#ids + 1] = id_in(line, standing[at])
end
local records, packed = fetch(JOBS, ids), fetch(RUNS, ids)
local answer = { last + 1 < stop and #standing > 0 and { standing[#standing], standing[#standing - 1] } or 0 }
for at, id in ipairs(ids) do
  local found = find(id, records[at], packed[at])
  if found then
    answer[#answer + 1] = id
    answer[#answer + 1] = show(id, found, records[at], packed[at])
  end
end
return cmsgpack.pack(answer)
