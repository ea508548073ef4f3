-- Make delayed jobs due now, and those that wait for others. ARGV[2]: ids. Answers how many there were.
local count = 0
for _, id in ipairs(cmsgpack.unpack(ARGV[2])) do
  local found = lookup(id)
  local waited = found and found.state == STATE.waiting
  if waited or found and (found.state == STATE.scheduled or found.state == STATE.failing) then
    local job, run = found.job, found.run
    local standing = member(job.name, job.priority, run.place, id)
    redis.call('ZREM', SCHEDULED, standing)
    redis.call('ZREM', FAILING, standing)
    run.state, run.place = STATE.queued, next_place()
    redis.call('HSET', RUNS, id, write_run(run))
    line_up(job, run.place, id)
    if waited then
      redis.call('ZREM', WAITING, id)
      if followed then
        stop_following(id)
      end
      tell(EVENT.queued, id)
    end
    count = count + 1
  end
end
finish()
return count
