-- The record becomes that of the next link, except its id, date and progress. The token stays until the next claim, so
-- that a repeated settle is recognised.
local function continue(id, job, run, new)
  local _, name, key, priority, delay, version, rest = unpack(new)
  local begun = next_place()
  local place = begun + delay
  local fresh = fresh_run(place)
  fresh.token, fresh.progress = run.token, run.progress
  local left, fault
  if new[9] then
    left, fault = left_to_follow(new, {})
  end
  if fault or left and #left > 0 then
    fresh.place = job.created + delay -- while a job waits, its delay is what its place is behind its date
    local record = write_job(version, fresh.place, job.created, rest)
    redis.call('HSET', JOBS, id, record)
    tell(EVENT.queued, id)
    if fault then
      fresh.error = fault
      conclude(id, record, read_job(record), fresh, STATE.failed, read_job(record).keep_failed)
    else
      wait_for(id, fresh, begun, new[9][1], left)
    end
    return
  end
  fresh.state = delay > 0 and STATE.scheduled or STATE.queued
  redis.call('HSET', JOBS, id, write_job(version, place, job.created, rest))
  redis.call('HSET', RUNS, id, write_run(fresh))
  if delay == 0 then
    line_up({ name = name, priority = priority, key = key }, place, id)
  else
    redis.call('ZADD', SCHEDULED, place, member(name, priority, place, id))
    if limited and string.byte(key) == RESERVED then
      holding().is_late(key)
    end
    wake(name)
  end
  tell(EVENT.queued, id)
end
