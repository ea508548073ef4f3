-- Claim many jobs with BullMQ's moveToActive, whose keys these are. ARGV[1]: prefix of the queue's keys, [2]: now,
-- [3]: what the tokens begin with, [4]: the duration of the locks in ms, [5]: how many jobs, [6]: number of the first.
-- Answers what moveToActive does for each claim, up to the first that finds no job.
local P, IN_FRONT = ARGV[1], false
local broken = next_owned_by_bull(P) or damage(P, { 'wait', 'active', 'prioritized', 'events', 'marker', 'pc', 'limiter' })
if broken then
  return broken
end

-- Each claim moves up to 1 000 jobs that are due. While there are more, one claim a call is enough for the server to do.
local function is_crowded()
  local due = string.format('%.0f', (tonumber(ARGV[2]) + 1) * 0x1000 - 1)
  return #redis.pcall('ZRANGEBYSCORE', KEYS[7], 0, due, 'LIMIT', 1000, 1) > 0
end

local answers, arguments = {}, { P, ARGV[2] }
local lasts, count, first = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
if count > 1 and is_crowded() then
  count = 1
end
for at = first, first + count - 1 do
  local token = ARGV[3] .. string.format('%x', at)
  arguments[3] = { token = token, lockDuration = lasts, name = token }
  local answer, good = attempt(theirs, KEYS, arguments)
  answers[#answers + 1] = answer
  if good and answer[2] == 0 then
    break
  end
end
