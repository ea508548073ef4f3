-- Add many jobs with BullMQ's addStandardJob, whose keys these are. ARGV: prefix of the queue's keys, now, and for each job
-- its id, name, data and packed options. Answers for each whether its id was there before (1), then what addStandardJob
-- does, or an error.
local P, IN_FRONT = ARGV[1], false

-- What BullMQ does for each job is done once where nothing that is added changes it.
local function once(step)
  local answer
  return function(...)
    answer = answer or { step(...) }
    return answer[1]
  end
end
getOrSetMaxEvents, isQueuePausedOrMaxed = once(getOrSetMaxEvents), once(isQueuePausedOrMaxed)
addBaseMarkerIfNeeded = once(addBaseMarkerIfNeeded)

local existed
local handle_duplicated = handleDuplicatedJob
handleDuplicatedJob = function(...)
  existed = 1
  return handle_duplicated(...)
end

local answers, timestamp = {}, tonumber(ARGV[2])
for at = 3, #ARGV, 4 do
  existed = 0
  local answer = attempt(theirs, KEYS, { { P, ARGV[at], ARGV[at + 1], timestamp }, ARGV[at + 2], ARGV[at + 3] })
  answers[#answers + 1] = existed
  answers[#answers + 1] = answer
end
