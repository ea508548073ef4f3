-- End many jobs with BullMQ's moveToFinished, whose keys KEYS[1...10] are, KEYS[11] is its marker; then the completed and
-- the failed jobs. ARGV[1]: prefix of the queue's keys, [2]: now; then for each job its id, `completed` or `failed`, and
-- moveToFinished's value, options and fields. Answers what moveToFinished does, or an error, for each.
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

local answers, keys, arguments = {}, { unpack(KEYS, 1, 10) }, { [2] = ARGV[2], [6] = '', [7] = P }
keys[14] = KEYS[11]
for at = 3, #ARGV, 5 do
  local id, target = ARGV[at], ARGV[at + 1]
  local ends = ENDS[target]
  keys[11], keys[12], keys[13] = ends.key, P .. id, P .. 'metrics:' .. target
  arguments[1], arguments[3], arguments[4], arguments[5] = id, ends.field, ARGV[at + 2], target
  arguments[8], arguments[9] = ARGV[at + 3], ARGV[at + 4]
  answers[#answers + 1] = ends.broken or attempt(finish, keys, arguments)
end
