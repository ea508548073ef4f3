-- Return what a status is made of: `{state, head of the record, run without its result}`.
local function show(found, record, packed)
  local run = packed and string.sub(packed, 1, found.run.finish - 1) or ''
  return { found.state, string.sub(record, 1, found.job.finish - 1), run }
end
