-- Return what a status is made of: `{state, head of the record, run without its result}`, and for a waiting job how many
-- it waits for.
local function show(id, found, record, packed)
  local run = packed and string.sub(packed, 1, found.run.finish - 1) or ''
  return { found.state, string.sub(record, 1, found.job.finish - 1), run,
    found.state == STATE.waiting and tonumber(redis.call('HGET', AFTER, 'L' .. id)) or nil }
end
