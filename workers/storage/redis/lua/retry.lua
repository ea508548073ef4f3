-- Queue failed jobs again. ARGV[2]: ids. Answers how many there were.
local count = 0
for _, id in ipairs(cmsgpack.unpack(ARGV[2])) do
  local found = lookup(id)
  if found and found.state == STATE.failed then
    local run = fresh_run(next_place())
    redis.call('ZREM', FAILED, id)
    redis.call('HSET', RUNS, id, write_run(run))
    line_up(found.job, run.place, id)
    tell(EVENT.queued, id)
    count = count + 1
  end
end
finish()
return count
