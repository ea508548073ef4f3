-- Read results. ARGV[5]: jobs, each `{ids}` it may have. Answers how each ended, for as many as fit into one answer: 0
-- for one that has not, else `{state, returnvalue, exact result, reason, stacks, facts, stall, attempts,
-- attemptsMade}`.
local ENOUGH_BYTES = 8 * 1024 * 1024
local answer, bytes = {}, 0
for at, ids in ipairs(cmsgpack.unpack(ARGV[5])) do
  if bytes > ENOUGH_BYTES then
    break
  end
  local id, state = find(ids)
  answer[at] = 0
  if state == STATE.completed or state == STATE.failed then
    answer[at] = {
      state, unpack(fields(
        id, 'returnvalue', 'workers:result', 'failedReason', 'stacktrace', 'workers:error', 'workers:stalled', 'attempts', 'attemptsMade'
      )),
    }
    bytes = bytes + #(answer[at][2] or '')
  elseif state == STATE.cancelled then
    answer[at] = { state }
  end
end
return cmsgpack.pack(answer)
