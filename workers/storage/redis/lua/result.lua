-- Read results. ARGV[2]: ids. Answers for each `{state, error, result}` of a job that has ended, 0 for others. The
-- answer breaks off where it gets too large, but has at least one.
local ENOUGH_BYTES = 1024 * 1024
local ids = cmsgpack.unpack(ARGV[2])
local answer, bytes = {}, 0
for at, packed in ipairs(fetch(RUNS, ids)) do
  local run = packed and read_run(packed)
  if not run or not LINE_OF[run.state] or run.expires <= now then
    answer[at] = 0
  else
    answer[at] = { run.state, run.error, run.state == STATE.completed and run.result or '' }
    bytes = bytes + #packed
    if bytes > ENOUGH_BYTES then
      break
    end
  end
end
return cmsgpack.pack(answer)
