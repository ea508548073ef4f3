-- Complete an unfinished job. ARGV[5]: `{ids}` it may have, [6]: its return value, [7]: its exact result if that cannot
-- express it, else empty, [8]: how long it is kept, empty for its own retention, [9]: how long at least, if at all. Answers the state it was in, nothing
-- if there is no such job.
local id, state = find(cmsgpack.unpack(ARGV[5]))
if not id then
  return false
end
if not ended(state) then
  take(id, state)
  local changes = { 'returnvalue', ARGV[6] }
  if ARGV[7] ~= '' then
    changes[3], changes[4] = 'workers:result', ARGV[7]
  end
  if state ~= STATE.processing then
    changes[#changes + 1] = 'workers:idle'
    changes[#changes + 1] = '1'
  end
  redis.call('HDEL', P .. id, CLAIM, 'lockAcquired', 'workers:cancel')
  local keep = tonumber(ARGV[8]) or keep_of(options((fields(id, 'opts') or {})[1]), 'keepCompleted')
  if keep > 0 then
    keep = math.max(keep, tonumber(ARGV[9]))
  end
  conclude(id, COMPLETED, keep, changes, ARGV[6])
end
finish()
return state
