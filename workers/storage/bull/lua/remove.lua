-- Remove jobs. ARGV[5]: jobs, each `{ids}` it may have, [6]: 1 to remove running ones too. Answers the places of those
-- that were removed, and the ids of those that somebody has the lock of, though they do not run.
local places, locked, force = {}, {}, ARGV[6] == '1'
for place, ids in ipairs(cmsgpack.unpack(ARGV[5])) do
  local id, state = find(ids)
  if id and (force or state ~= STATE.processing and not is_locked(id, locked)) then
    if not ended(state) then
      take(id, state)
    end
    forget(id)
    places[#places + 1] = place
  end
end
finish()
return cmsgpack.pack({ places, locked })
