-- Behind BullMQ's moveStalledJobsToWait, whose answer is the ids requeued, and which was told the larger of two limits.
-- ARGV[5]: how often a job of ours may stall, [6]: how often one of another producer may.
-- Those beyond their own limit are to fail, as BullMQ has it: at their next claim, with this reason. It spares the runs
-- of a job scheduler.
local function is_scheduled(scheduler)
  return scheduler and (redis.call('EXISTS', P .. 'repeat:' .. scheduler) == 1
    or redis.call('ZSCORE', P .. 'repeat', scheduler) ~= false)
end

local function give_up(id)
  local stalls, options, scheduler = unpack(redis.call('HMGET', P .. id, 'stc', 'opts', 'rjk'))
  if tonumber(stalls) > tonumber(is_ours(options) and ARGV[5] or ARGV[6]) and not is_scheduled(scheduler) then
    redis.call('HSET', P .. id, 'defa', 'job stalled more than allowable limit')
  end
end

for _, id in ipairs(answer) do
  pcall(give_up, id)
end
