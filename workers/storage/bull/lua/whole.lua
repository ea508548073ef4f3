-- Read jobs as a whole. ARGV[5]: jobs, each `{ids}` it may have. Answers for as many as fit into one answer 0, or `{what
-- `shown` returns, data, returnvalue, exact result, failed attempts}`.
local ENOUGH_BYTES = 1024 * 1024
local answer, bytes = {}, 0
for at, ids in ipairs(cmsgpack.unpack(ARGV[5])) do
  if bytes > ENOUGH_BYTES then
    break
  end
  local job = shown(ids)
  answer[at] = 0
  if job then
    local rest = fields(job[1], 'data', 'returnvalue', 'workers:result', FAILURES)
    answer[at] = { job, unpack(rest, 1, 4) }
    for part = 1, 4 do
      bytes = bytes + #(rest[part] or '')
    end
  end
end
return cmsgpack.pack(answer)
