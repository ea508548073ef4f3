-- Keep a record longer or shorter. ARGV[2]: id, [3]: for how long from now. Answers whether the job had ended.
local id = ARGV[2]
local found = lookup(id)
if not found or not LINE_OF[found.state] then
  return 0
end
found.run.expires = now + tonumber(ARGV[3])
redis.call('HSET', RUNS, id, write_run(found.run))
redis.call('ZADD', LINE_OF[found.state], found.run.expires, id)
return 1
