-- End many jobs with BullMQ's moveToFinished, then claim many with the part of it that fetches the next one. KEYS[1...10]
-- are moveToFinished's, KEYS[11] is its marker; then the completed and the failed jobs. ARGV[1]: prefix of the queue's keys,
-- [2]: now, by which jobs end, [3]: how many jobs to claim, [4]: now, by which they are claimed, [5]: what their tokens begin
-- with, [6]: the duration of their locks in ms; then for each job that ends its id, `completed` or `failed`, and
-- moveToFinished's value, options and fields.
-- Answers `{endings, claims, tried}`: what moveToFinished does, or an error, for each that ends; what moveToActive would, for
-- each claim up to the first that finds no job; 0 if nothing was claimed because it takes a look of `guard` before.
local P, IN_FRONT = ARGV[1], false
local broken = damage(P, { 'wait', 'active', 'prioritized', 'stalled', 'events', 'meta' })
if broken then
  return broken
end
local ENDS = {
  completed = { key = KEYS[12], field = 'returnvalue', broken = damage(P, { 'completed' }) },
  failed = { key = KEYS[13], field = 'failedReason', broken = damage(P, { 'failed' }) },
}

local function finish(keys, arguments)
  return refusal(P, keys[12], arguments[5]) or theirs(keys, arguments)
end

local function end_all()
  local answers, keys, arguments = {}, { unpack(KEYS, 1, 10) }, { [2] = ARGV[2], [6] = '', [7] = P }
  keys[14] = KEYS[11]
  for at = 7, #ARGV, 5 do
    local id, target = ARGV[at], ARGV[at + 1]
    local ends = ENDS[target]
    keys[11], keys[12], keys[13] = ends.key, P .. id, P .. 'metrics:' .. target
    arguments[1], arguments[3], arguments[4], arguments[5] = id, ends.field, ARGV[at + 2], target
    arguments[8], arguments[9] = ARGV[at + 3], ARGV[at + 4]
    answers[#answers + 1] = ends.broken or attempt(finish, keys, arguments)
  end
  return answers
end

-- Tell whether the next `count` claims are of plain jobs of a queue without rules: none that is due only now, no pause, no
-- limit of any kind. Whatever is out of the ordinary is claimed behind a look of `guard`.
local function is_plain(count)
  if damage(P, { 'marker', 'pc', 'limiter', 'delayed' }) then
    return false
  end
  local rules = redis.call('HMGET', KEYS[9], 'paused', 'concurrency', 'max')
  local due = string.format('%.0f', (tonumber(ARGV[4]) + 1) * 0x1000 - 1)
  if rules[1] or rules[2] or rules[3] or #redis.call('ZRANGEBYSCORE', KEYS[7], 0, due, 'LIMIT', 0, 1) > 0 then
    return false
  end
  local ids = redis.call('LRANGE', KEYS[1], -count, -1)
  if #ids < count then
    for _, id in ipairs(redis.call('ZRANGE', KEYS[3], 0, count - #ids - 1)) do
      ids[#ids + 1] = id
    end
  end
  for _, id in ipairs(ids) do
    if fault_of(P, id) then
      return false
    end
  end
  return true
end

local function fetch(_, token)
  local answer = fetchNextJob(KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[6], KEYS[7], KEYS[9], KEYS[10], KEYS[11], P, ARGV[4],
    { token = token, lockDuration = tonumber(ARGV[6]), name = token })
  return answer or { 0, 0, 0, 0 }
end

local function claim(count)
  local answers = {}
  for at = 0, count - 1 do
    local answer, good = attempt(fetch, nil, ARGV[5] .. string.format('%x', at))
    answers[#answers + 1] = answer
    if good and answer[2] == 0 then
      break
    end
  end
  return answers
end

local answers, count = { end_all() }, tonumber(ARGV[3])
local plain = count > 0 and is_plain(count)
answers[2], answers[3] = plain and claim(count) or {}, plain and 1 or 0
