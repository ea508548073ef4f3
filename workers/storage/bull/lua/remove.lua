-- Remove jobs. ARGV[5]: jobs, each `{ids}` it may have, [6]: 1 to remove running ones too. Answers how many were
-- removed.
local count = 0
for _, ids in ipairs(cmsgpack.unpack(ARGV[5])) do
  local id, state = find(ids)
  if id and (state ~= STATE.processing or ARGV[6] == '1') then
    if not ended(state) then
      take(id, state)
    end
    forget(id)
    count = count + 1
  end
end
finish()
return count
