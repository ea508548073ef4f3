-- Store progress. ARGV[2]: reports, each `{id, token, progress}`; those of claims that do not hold their job are
-- ignored.
for _, report in ipairs(cmsgpack.unpack(ARGV[2])) do
  local id, token = report[1], report[2]
  local packed = redis.call('HGET', RUNS, id)
  local run = packed and read_run(packed)
  if run and run.state == STATE.processing and run.token == token then
    run.progress = report[3]
    redis.call('HSET', RUNS, id, write_run(run))
    tell(EVENT.progress, id)
  end
end
finish()
