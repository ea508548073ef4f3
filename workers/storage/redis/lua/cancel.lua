-- ARGV[2]: id. Answers the state found, 0 for none; a waiting job is cancelled.
local id = ARGV[2]
local found, record = lookup(id)
if not found then
  return 0
end
local job, run = found.job, found.run
if found.state == STATE.processing then
  run.cancel = 1
  redis.call('HSET', RUNS, id, write_run(run))
  request_cancel(id)
elseif not LINE_OF[found.state] then
  take(id, job, run)
  run.token = NO_TOKEN
  conclude(id, record, job, run, STATE.cancelled, job.keep_failed)
end
finish()
return found.state
