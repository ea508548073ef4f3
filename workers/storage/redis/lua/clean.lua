-- Remove old records. ARGV[2]: the line, [3]: how many to skip, [4]: how many to look at, [5]: limit, [6]: how long ago
-- they ended at least. Answers how many were looked at, and how many were removed.
local line = BASE .. ':' .. ARGV[2]
local skipped = redis.call('ZCOUNT', line, '-inf', now) + tonumber(ARGV[3])
local ids = redis.call('ZRANGE', line, skipped, skipped + tonumber(ARGV[4]) - 1)
local gone = {}
for at, packed in ipairs(fetch(RUNS, ids)) do
  local run = packed and read_run(packed)
  if #gone < tonumber(ARGV[5]) and run and run.finished <= now - tonumber(ARGV[6]) then
    gone[#gone + 1] = ids[at]
  end
end
for _, id in ipairs(gone) do
  forget_told(id)
end
batched('HDEL', JOBS, gone)
batched('HDEL', RUNS, gone)
batched('ZREM', line, gone)
return { #ids, #gone }
