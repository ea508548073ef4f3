-- ARGV[2]: a row, `{name, revision, due or 0, body}`; [3]: jobs, as `add` takes them. Answers 1 if the row's revision was
-- the one before.
local name, revision, due, body = unpack(cmsgpack.unpack(ARGV[2]))
local kept = cron_row(name)
if (kept and kept[1] or 0) ~= revision - 1 then
  return 0
end
local jobs = cmsgpack.unpack(ARGV[3])
if #jobs > 0 then
  add(jobs)
end
redis.call('HSET', CRONS, name, cmsgpack.pack({ revision, due, body }))
if due > 0 then
  redis.call('ZADD', CRONS_DUE, string.format('%.0f', due), name)
else
  redis.call('ZREM', CRONS_DUE, name)
end
finish()
return 1
