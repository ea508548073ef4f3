-- Whether the queue is one of Bull, whose keys and records are like BullMQ's. Every script of BullMQ that adds a job makes
-- `events` and `meta`, and none of Bull's does.
local function is_unannounced(prefix)
  return redis.call('EXISTS', prefix .. 'events', prefix .. 'meta') == 0
end

-- Return the options of a job if they have all that Bull 3 and newer give each job, and BullMQ only one that asks for it.
local function options_like_bulls(text)
  local good, opts = pcall(cjson.decode, text or '')
  return good and type(opts) == 'table' and opts.attempts and opts.delay and opts.timestamp and opts
end

-- Return the error that says so if one of the records, `{data, opts, attempts}`, is none that BullMQ has added.
local function owned_by_bull(prefix, records)
  for _, job in ipairs(records) do
    if job[1] and (job[3] or options_like_bulls(job[2])) then
      local whose = job[3] and 'Bull 1, whose URL begins with bull+redis://'
        or 'Bull 3 or newer: leave it to them, and take another name or prefix'
      return redis.error_reply('FOREIGN ' .. prefix .. '... has jobs, but no `events` and no `meta`; this queue is one of ' .. whose)
    end
  end
end

-- Return it for a queue whose next jobs prove it.
local function next_owned_by_bull(prefix)
  if not is_unannounced(prefix) then
    return
  end
  local records = {}
  for _, line in ipairs({ { 'LINDEX', 'wait', -1 }, { 'LINDEX', 'active', -1 }, { 'ZRANGE', 'delayed', 0, 0 } }) do
    local found = redis.pcall(line[1], prefix .. line[2], unpack(line, 3))
    local id = type(found) == 'table' and found[1] or found
    local job = type(id) == 'string' and redis.pcall('HMGET', prefix .. id, 'data', 'opts', 'attempts')
    if job and not job.err then
      records[#records + 1] = job
    end
  end
  return owned_by_bull(prefix, records)
end
