-- Behind a script of BullMQ's that may have put jobs into `wait`, also while the queue is paused.
-- BullMQ 5 renames `wait` to `paused` when it pauses, and `paused` to `wait` when it resumes: whatever is in `wait` then
-- is lost. So jobs wait in `paused` meanwhile. Later versions, which leave them in `wait`, take them from there too.
local function park()
  local WAIT, PAUSED = P .. 'wait', P .. 'paused'
  if redis.call('HEXISTS', P .. 'meta', 'paused') == 0 or redis.call('EXISTS', WAIT) == 0 then
    return
  end
  if redis.call('LLEN', PAUSED) < redis.call('LLEN', WAIT) then -- the shorter list is the one that moves job by job
    while redis.call('RPOPLPUSH', PAUSED, WAIT) do end
    redis.call('RENAME', WAIT, PAUSED)
  end
  while redis.call('EXISTS', WAIT) == 1 do
    if IN_FRONT then
      redis.call('RPUSH', PAUSED, redis.call('LPOP', WAIT))
    else
      redis.call('RPOPLPUSH', WAIT, PAUSED)
    end
  end
end
pcall(park)
