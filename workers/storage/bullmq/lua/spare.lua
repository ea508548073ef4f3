-- Behind BullMQ's drain, which spares the next jobs of schedulers, but shortens its lists by as many jobs as it removed, at
-- the one end, whichever are there. A schedule whose next job is in no line has ended, and an id without a job runs empty.
redis.call('DEL', KEYS[1], KEYS[2])
for _, each in ipairs(spared) do
  redis.call('RPUSH', each.line, each.id)
  redis.call('ZADD', P .. 'marker', 0, '0')
end
