-- Remove jobs. ARGV[5]: jobs, each `{ids}` it may have, [6]: 1 to remove running ones too. Answers how many were
-- removed, and the ids of those that somebody has the lock of, though they do not run.
local count, locked, force = 0, {}, ARGV[6] == '1'
for _, ids in ipairs(cmsgpack.unpack(ARGV[5])) do
  local id, state = find(ids)
  if id and (force or state ~= STATE.processing and not is_locked(id, locked)) then
    if not ended(state) then
      take(id, state)
    end
    forget(id)
    count = count + 1
  end
end
finish()
return cmsgpack.pack({ count, locked })
