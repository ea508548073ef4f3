-- Recover abandoned jobs. ARGV[5]: limit, [6]: stalls allowed, [7]: 1 if a claim of ours ends with its lock, [8]:
-- `{ids}` that have had no lock for long enough. Answers the ids that are in line again, that failed, that were
-- dropped, that have no lock and must be looked at again, and `{id, why, ...}` for those set aside. Due jobs are lined up
-- as well, because a worker whose slots are full does not claim.
line_up_what_is_due(DUE_AT_ONCE)

local LOOKED_AT, STALLS_OF_NODE = 10000, 1
local limit, max_stalls, ours_at_once = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7] == '1'
local ripe = {}
for _, id in ipairs(cmsgpack.unpack(ARGV[8])) do
  ripe[id] = true
end
local requeued, failed, suspects = {}, {}, {}

local function give_up(id, job, stalls, most)
  local facts = cjson.encode({ job.worker, job.spent, job.attempts, stalls, most })
  local changes = { 'failedReason', 'job stalled more than allowable limit', 'workers:stalled', facts }
  conclude(id, FAILED, keep_of(options(job.opts), 'keepFailed'), changes, '{}')
  redis.call('HDEL', P .. id, CLAIM)
  failed[#failed + 1] = id
end

-- A lost claim of ours counts as an attempt of a job of ours; Node's producers expect that it does not, and that the job
-- fails when it stalls for the second time, whoever notices. A job that Node
-- has taken and never locked has not begun, unless Node cannot read it: then Node would take and leave it again and
-- again.
local function recover(id, found)
  local mark, ours = found[2], found[3]
  local counted = mark or found[4] or DIALECT ~= 'C' or not (json(found[1]) and json(found[8]))
  local stalls = whole(found[5]) + (counted and 1 or 0)
  local job = {
    worker = mark and string.sub(mark, 2 + TOKEN_LENGTH) or '', attempts = math.max(1, whole(found[6])), opts = found[8],
    spent = whole(found[7]) + (ours and stalls or 0),
  }
  redis.call('HMSET', P .. id, 'stalledCounter', string.format('%.0f', stalls))
  if mark then
    local lost = lost_attempt(ours and job.spent or job.spent + 1, job.worker)
    redis.call('HSET', P .. id, FAILURES, with_failure(found[9] or '', lost, now))
  end
  local most = (ours or DIALECT ~= 'C') and max_stalls or math.min(max_stalls, STALLS_OF_NODE)
  if stalls > most or (ours and mark and job.spent >= job.attempts) then
    return give_up(id, job, stalls, most)
  end
  redis.call('HDEL', P .. id, CLAIM, 'lockAcquired')
  unlock(id)
  line_up_in_front(id)
  tell(EVENT.queued, id)
  emit('stalled', id)
  requeued[#requeued + 1] = id
end

local function look(id, completed)
  local found = fields(id, 'data', CLAIM, 'name', 'lockAcquired', 'stalledCounter', 'attempts', 'attemptsMade', 'opts', FAILURES)
  local mark = found and found[2]
  local held = mark and string.sub(mark, 1, 1) == '+'
  if not ripe[id] and not (ours_at_once and held) then
    suspects[#suspects + 1] = id
    return
  end
  redis.call('LREM', ACTIVE, 0, id)
  if completed == 1 then
    return
  elseif not found or not found[1] then
    drop(id)
    return
  end
  found[2] = held and mark
  recover(id, found)
end

-- Oldest first, the order in which they go back into the line.
local active = redis.call('LRANGE', ACTIVE, -LOOKED_AT, -1)
local holders, seen = locks_of(active), {}
for at = #active, 1, -1 do
  local id = active[at]
  if #requeued + #failed >= limit then
    break
  end
  if not holders[at] and not seen[id] then
    seen[id] = true
    look(id, redis.call('SISMEMBER', COMPLETED, id))
  end
end
finish()
return cmsgpack.pack({ requeued, failed, dropped, suspects, told })
