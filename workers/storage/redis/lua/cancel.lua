-- Cancel a waiting job, or asks a running one to end. ARGV[2]: id, [3]: how long the cancel is remembered. Answers the
-- state found, 0 for none.
local id = ARGV[2]
local found = lookup(id)
if not found then
  return 0
end
if found.state == STATE.processing then
  found.run.cancel = 1
  redis.call('HSET', RUNS, id, write_run(found.run))
  request_cancel(id)
elseif not LINE_OF[found.state] then
  local run = fresh_run(found.run.place)
  run.state, run.finished, run.expires = STATE.cancelled, now, now + tonumber(ARGV[3])
  redis.call('HSET', JOBS, id, '')
  redis.call('HSET', RUNS, id, write_run(run))
  redis.call('ZADD', CANCELLED, run.expires, id)
  unmark(id)
  step_out(found.job, found.run.place, id)
  tell(EVENT.cancelled, id)
end
finish()
return found.state
