-- Count the jobs that each worker holds.
local function holders()
  local counts = {}
  for _, packed in ipairs(fetch(RUNS, redis.call('ZRANGE', LEASES, 0, -1))) do
    local run = packed and read_run(packed)
    if run and run.state == STATE.processing then
      counts[run.worker] = (counts[run.worker] or 0) + 1
    end
  end
  return counts
end
