-- Failed attempts, as in `workers/storage/failures.py`.
local FAILURES_KEPT = 20
local VANISHED = 'its worker vanished or lost its lease'

-- Return the text with one more line, if there is one to note; the oldest lines are dropped.
local function with_failure(before, noted, milliseconds)
  if not noted then
    return before
  end
  local kept, count = string.format('%.0f ', math.floor(milliseconds)) .. noted, 1
  for line in string.gmatch(string.reverse(before), '[^\n]+') do
    if count == FAILURES_KEPT then
      break
    end
    kept, count = string.reverse(line) .. '\n' .. kept, count + 1
  end
  return kept
end

local function lost_attempt(attempt, worker)
  return cjson.encode({ attempt, worker or cjson.null, cjson.null, 'StalledError', VANISHED })
end
