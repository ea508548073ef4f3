-- Complete an unfinished job. ARGV[2]: id, [3]: result, [4]: how long it is kept, by default as long as the job says.
-- Answers the state found, 0 for none.
local id = ARGV[2]
local found, record = lookup(id)
if not found then
  return 0
end
if not LINE_OF[found.state] then
  need_room()
  local job, run = found.job, found.run
  take(id, job, run)
  run.token, run.result = NO_TOKEN, ARGV[3]
  local keep = tonumber(ARGV[4]) or job.keep_completed
  if keep > 0 and #run.result > TOLD_BYTES then
    keep = math.max(keep, MINUTE)
  end
  conclude(id, record, job, run, STATE.completed, keep)
end
finish()
return found.state
