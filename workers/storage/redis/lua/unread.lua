-- Answers `{id, token, ...}`: the jobs that are claimed with these 12 random bytes, ARGV[2].
local found, ids = {}, redis.call('ZRANGE', LEASES, 0, -1)
local packed = fetch(RUNS, ids)
for at, id in ipairs(ids) do
  local run = packed[at] and read_run(packed[at])
  if run and run.state == STATE.processing and string.sub(run.token, 1, #ARGV[2]) == ARGV[2] then
    found[#found + 1] = id
    found[#found + 1] = run.token
  end
end
return cmsgpack.pack(found)
