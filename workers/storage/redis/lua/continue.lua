-- The record becomes that of the next link, except its id, date and progress. The token stays until the next claim, so
-- that a repeated settle is recognised.
local function continue(id, job, run, new)
  local _, name, key, priority, delay, version, rest = unpack(new)
  local place = next_place() + delay
  local fresh = fresh_run(place)
  fresh.token, fresh.progress = run.token, run.progress
  fresh.state = delay > 0 and STATE.scheduled or STATE.queued
  redis.call('HSET', JOBS, id, write_job(version, place, job.created, rest))
  redis.call('HSET', RUNS, id, write_run(fresh))
  if delay == 0 then
    line_up({ name = name, priority = priority, key = key }, place, id)
  else
    redis.call('ZADD', SCHEDULED, place, member(name, priority, place, id))
    if gated and string.byte(key) == GATE then
      gates().is_late(key)
    end
    wake(name)
  end
  tell(EVENT.queued, id)
end
