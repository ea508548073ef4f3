-- The numbers by which scripts answer and publish states and events; `messages.py` has the same.
local STATE = { queued = 1, failing = 2, processing = 3, completed = 4, failed = 5, cancelled = 6, scheduled = 7, waiting = 8 }
local EVENT = { queued = 1, active = 2, completed = 3, failing = 4, failed = 5, cancelled = 6, cancel_requested = 7, progress = 8 }

-- Note what has happened, for the message at the end of the script.
local events = {}
local function tell(kind, id)
  events[#events + 1] = kind
  events[#events + 1] = id
end
