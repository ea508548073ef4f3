-- Recover jobs whose lease expired. ARGV[2]: limit, [3]: stalls allowed, [4]: the longest lease there is, [5]: how long
-- one lasts that is longer. Answers the ids queued again, the ids that failed, and `{id, why, ...}` for those of the
-- failed ones that were set aside.
local STALLED = '\2'
local max_stalls = tonumber(ARGV[3])
local broken = foreign(QUARANTINE, 'hash')
if broken then
  return damaged(broken)
end
-- What ends later than any lease may was given by a clock that was ahead, and perhaps nobody renews it.
local latest = string.format('(%.0f', now + ARGV[4])
for _, id in ipairs(redis.call('ZRANGEBYSCORE', LEASES, latest, '+inf', 'LIMIT', 0, ARGV[2])) do
  redis.call('ZADD', LEASES, now + ARGV[5], id)
end
local ids = redis.call('ZRANGEBYSCORE', LEASES, '-inf', now, 'LIMIT', 0, ARGV[2])
local records, packed = fetch(JOBS, ids), fetch(RUNS, ids)
local requeued, failed = {}, {}
for at, id in ipairs(ids) do
  local job, run = read_job(records[at]), packed[at] and read_run(packed[at])
  if not (records[at] or packed[at]) or (run and run.state ~= STATE.processing) then
    redis.call('ZREM', LEASES, id) -- a lease without a job
  elseif not job or not run then
    set_aside(id, job and job.name or '', job and job.priority or 0, job and job.place or now, records[at], packed[at])
    let_go(id, job or { key = '' })
    failed[#failed + 1] = id
  else
    run.stalls, run.token = run.stalls + 1, NO_TOKEN
    run.result = with_failure(run.result, lost_attempt(run.attempts, run.worker), now / 1000)
    if run.stalls > max_stalls or run.attempts >= job.max_attempts then
      run.error = STALLED .. cmsgpack.pack({ run.worker, run.attempts, job.max_attempts, run.stalls, max_stalls })
      conclude(id, records[at], job, run, STATE.failed, job.keep_failed)
      failed[#failed + 1] = id
    else
      run.state, run.worker = STATE.queued, ''
      redis.call('HSET', RUNS, id, write_run(run))
      line_up(job, run.place, id)
      tell(EVENT.queued, id)
      requeued[#requeued + 1] = id
    end
    let_go(id, job)
  end
end
finish()
return cmsgpack.pack({ requeued, failed, told })
