-- Remove waiting jobs that nothing else refers to: no flow, no job scheduler, no deduplication key, no claim.
-- KEYS: wait, completed, failed, delayed, prioritized, events, meta. ARGV[1]: prefix of the jobs' keys.
-- ARGV[2...]: ids. Answers those removed.
-- BullMQ's removeJob searches the list for each job; this walks it once for all, from the old end.
local call, PAGE, GONE = redis.call, 1000, ''

local function is_plain(id)
  local job = ARGV[1] .. id
  local found = call('HMGET', job, 'timestamp', 'rjk', 'parentKey', 'deid')
  if not found[1] or found[2] or found[3] or found[4] then
    return false
  end
  for at = 2, 5 do
    if call('ZSCORE', KEYS[at], id) then
      return false
    end
  end
  return call('EXISTS', job .. ':lock', job .. ':dependencies', job .. ':processed', job .. ':failed',
    job .. ':unsuccessful') == 0
end

local wanted, left = {}, 0
for at = 2, #ARGV do
  if not wanted[ARGV[at]] and is_plain(ARGV[at]) then
    wanted[ARGV[at]], left = true, left + 1
  end
end

local removed, stop = {}, call('LLEN', KEYS[1])
while left > 0 and stop > 0 do
  local start = math.max(stop - PAGE, 0)
  local page = call('LRANGE', KEYS[1], start, stop - 1)
  for at = #page, 1, -1 do
    if wanted[page[at]] then
      wanted[page[at]], left = nil, left - 1
      call('LSET', KEYS[1], start + at - 1, GONE)
      removed[#removed + 1] = page[at]
    end
  end
  stop = start
end

if #removed > 0 then
  call('LREM', KEYS[1], -#removed, GONE)
  local kept = call('HGET', KEYS[7], 'opts.maxLenEvents') or 10000
  for _, id in ipairs(removed) do
    call('DEL', ARGV[1] .. id, ARGV[1] .. id .. ':logs')
    call('XADD', KEYS[6], 'MAXLEN', '~', kept, '*', 'event', 'removed', 'jobId', id, 'prev', 'wait')
  end
end
return removed
