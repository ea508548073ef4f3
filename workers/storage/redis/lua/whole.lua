-- Read jobs as a whole. ARGV[2]: ids. Answers for each `{what `show` returns, record, result or failed attempts}`, 0 for
-- an unknown id. The answer breaks off where it gets too large, but has at least one.
local ENOUGH_BYTES = 1024 * 1024
local answer, bytes = {}, 0
for at, id in ipairs(cmsgpack.unpack(ARGV[2])) do
  local record, packed = redis.call('HGET', JOBS, id), redis.call('HGET', RUNS, id)
  local found = find(id, record, packed)
  answer[at] = found and { show(id, found, record, packed), record, found.run.result } or 0
  bytes = bytes + (found and #record + #found.run.result or 0)
  if bytes > ENOUGH_BYTES then
    break
  end
end
return cmsgpack.pack(answer)
