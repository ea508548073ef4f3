-- ARGV[2]: ids. Answers the places among them of those that had failed or were cancelled, and are queued.
local places = {}
for place, id in ipairs(cmsgpack.unpack(ARGV[2])) do
  local found = lookup(id)
  if found and STARTS_ANEW[found.state] then
    local run = fresh_run(next_place())
    redis.call('ZREM', LINE_OF[found.state], id)
    redis.call('HSET', RUNS, id, write_run(run))
    line_up(found.job, run.place, id)
    tell(EVENT.queued, id)
    places[#places + 1] = place
  end
end
finish()
return places
