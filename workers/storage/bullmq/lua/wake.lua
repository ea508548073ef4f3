-- Behind a script of BullMQ's that frees a slot of the queue's global concurrency. A worker of BullMQ's takes the next job
-- in the same step; ours claims separately, and others may. So somebody is to be woken, as nobody was while there was no
-- slot.
local function wake()
  local slots = tonumber(redis.call('HGET', P .. 'meta', 'concurrency') or '')
  if slots and redis.call('LLEN', P .. 'active') < slots and redis.call('HEXISTS', P .. 'meta', 'paused') == 0
    and redis.call('EXISTS', P .. 'wait', P .. 'prioritized', P .. 'delayed') > 0 then
    redis.call('ZADD', P .. 'marker', 0, '0')
  end
end
pcall(wake)
