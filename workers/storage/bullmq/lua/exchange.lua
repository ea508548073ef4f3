-- End many jobs with BullMQ's moveToFinished, then claim many with the part of it that fetches the next one. KEYS[1...10]
-- are moveToFinished's, KEYS[11] is its marker; then the completed and the failed jobs. ARGV[1]: prefix of the queue's keys,
-- [2]: now, by which jobs end, [3]: how many jobs to claim, [4]: now, by which they are claimed, [5]: what their tokens begin
-- with, [6]: the duration of their locks in ms, [7]: how many ways to end there are; then for each of these `completed` or
-- `failed`, `related` if its jobs were claimed with a parent or a deduplication key, and moveToFinished's options but for the
-- token; then for each job the number of its way, its id and token, and moveToFinished's value and fields.
-- Answers `{endings, claims, tried}`: what moveToFinished does, or an error, for each that ends; what moveToActive would, for
-- each claim up to the first that finds no job, or fails; 0 if nothing was claimed because it takes a look of `guard` before.
local P, IN_FRONT = ARGV[1], false
local rules = redis.pcall('HMGET', KEYS[9], 'paused', 'concurrency', 'max')
local waiting = redis.pcall('LLEN', KEYS[1])
local lengths = { -- an error, for a key of another type, or a number
  waiting, redis.pcall('LLEN', KEYS[2]), redis.pcall('ZCARD', KEYS[3]), redis.pcall('XLEN', KEYS[4]), redis.pcall('SCARD', KEYS[5]),
}
for at = 1, 5 do
  if rules.err or type(lengths[at]) == 'table' then
    return damage(P, { 'meta', 'wait', 'active', 'prioritized', 'events', 'stalled' }) or rules.err and rules or lengths[at]
  end
end

-- What BullMQ does for each job is done once where once a call has the same effect.
local function once(step)
  local is_done = false
  return function(...)
    if not is_done then
      is_done = true
      return step(...)
    end
  end
end

-- Nothing is removed as long as the oldest in line is not old enough; those that end now are the youngest.
local remove_by_age, oldest = removeJobsByMaxAge, {}
removeJobsByMaxAge = function(now, age, line, ...)
  oldest[line] = oldest[line] or tonumber(redis.call('ZRANGE', line, 0, 0, 'WITHSCORES')[2])
  if math.min(oldest[line], now) <= now - age * 1000 then
    oldest[line] = nil
    remove_by_age(now, age, line, ...)
  end
end
trimEvents = once(trimEvents)
-- With a job in line the queue is not drained; that is what there is to fetch, for those that end.
local fetch_next = fetchNextJob
fetchNextJob = function()
  return 0
end

local function ways_to_end(count)
  local ways = {}
  for way = 1, count do
    local target = ARGV[5 + 3 * way]
    ways[way] = {
      target = target, key = target == 'completed' and KEYS[12] or KEYS[13], broken = damage(P, { target }),
      metrics = P .. 'metrics:' .. target, field = target == 'completed' and 'returnvalue' or 'failedReason',
      is_related = ARGV[6 + 3 * way] == 'related', options = cmsgpack.unpack(ARGV[7 + 3 * way]),
    }
  end
  return ways
end

local function finish_related(keys, arguments)
  return refusal(P, keys[12], arguments[5]) or theirs(keys, arguments)
end

-- Keep a job where a recovery finds it: BullMQ's Lua has stopped half-way, at what was not there when the job was claimed.
local function keep(way, id)
  if redis.call('EXISTS', P .. id) == 1 and not redis.call('ZSCORE', way.key, id) then
    redis.call('LREM', KEYS[2], -1, id)
    redis.call('RPUSH', KEYS[2], id)
  end
end

local function end_all()
  local answers, keys, arguments = {}, { unpack(KEYS, 1, 10) }, { [2] = ARGV[2], [6] = waiting > 0 and '1' or '', [7] = P }
  local count = tonumber(ARGV[7])
  local ways = ways_to_end(count)
  keys[14] = KEYS[11]
  for at = 8 + 3 * count, #ARGV, 5 do
    local way, id = ways[tonumber(ARGV[at])], ARGV[at + 1]
    way.options.token = ARGV[at + 2]
    keys[11], keys[12], keys[13] = way.key, P .. id, way.metrics
    arguments[1], arguments[3], arguments[4], arguments[5] = id, way.field, ARGV[at + 3], way.target
    arguments[8], arguments[9] = way.options, ARGV[at + 4]
    local answer, good = way.broken, true
    if not answer then
      answer, good = attempt(way.is_related and finish_related or theirs, keys, arguments)
    end
    if not good then
      pcall(keep, way, id)
    end
    answers[#answers + 1] = answer
  end
  return answers
end

-- Tell whether the next claims are of a queue without rules: none that is due only now, no pause, no limit of any kind, and
-- no queue that may be one of Bull, which makes neither `events` nor `meta`.
-- Whatever is out of the ordinary is claimed behind a look of `guard`.
local function is_plain()
  if rules[1] or rules[2] or rules[3] or type(redis.pcall('ZCARD', KEYS[11])) == 'table' then
    return false
  elseif lengths[4] == 0 and redis.call('EXISTS', KEYS[4], KEYS[9]) == 0 then
    return false
  end
  local due = redis.pcall('ZRANGEBYSCORE', KEYS[7], 0, string.format('%.0f', (tonumber(ARGV[4]) + 1) * 0x1000 - 1), 'LIMIT', 0, 1)
  return not due.err and #due == 0
end

local function nothing() end

-- Claim up to `count` jobs. One with a fault is put back where `guard` will find it, and nothing is claimed behind it.
local function claim(count)
  local answers, taken, prepare = {}, nil, prepareJobForProcessing
  local options = { lockDuration = tonumber(ARGV[6]) }
  getQueueMetadata, promoteDelayedJobs, addBaseMarkerIfNeeded = nothing, nothing, once(addBaseMarkerIfNeeded)
  prepareJobForProcessing = function(prefix, limiter, events, id, ...)
    taken = id
    if is_reserved(id) then
      error(redis.error_reply(NAMED))
    end
    return prepare(prefix, limiter, events, id, ...)
  end

  local function fetch()
    local answer = fetch_next(KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[6], KEYS[7], KEYS[9], KEYS[10], KEYS[11], P, ARGV[4], options)
    local fault = taken and fault_in(answer[1])
    if fault then
      error(redis.error_reply(fault))
    end
    return answer or { 0, 0, 0, 0 }
  end

  local function put_back()
    redis.call('LREM', KEYS[2], 1, taken)
    redis.call('RPUSH', KEYS[1], taken)
    redis.call('DEL', P .. taken .. ':lock')
  end

  for at = 0, count - 1 do
    taken = nil
    options.token = ARGV[5] .. string.format('%x', at)
    options.name = options.token
    local answer, good = attempt(fetch)
    answers[#answers + 1] = answer
    if not good and taken then
      pcall(put_back)
    end
    if not good or answer[2] == 0 then
      break
    end
  end
  return answers
end

local answers, count = { end_all() }, tonumber(ARGV[3])
local plain = count > 0 and is_plain()
answers[2], answers[3] = plain and claim(count) or {}, plain and 1 or 0
if not (rules[1] or rules[2]) then -- no job is to be parked, and the queue has no slots of which one may be free now
  return answers
end
