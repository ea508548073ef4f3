-- ARGV[2]: id. Answers `{state, error, result}` of a job that has ended, nothing for others.
local packed = redis.call('HGET', RUNS, ARGV[2])
local run = packed and read_run(packed)
if not run or not LINE_OF[run.state] or run.expires <= now then
  return false
end
return cmsgpack.pack({ run.state, run.error, run.result })
