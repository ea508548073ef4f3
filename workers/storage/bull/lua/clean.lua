-- ARGV[5]: the name of the state they ended in, [6]: age in ms, [7]: limit, [8]: `{ids}`. Answers how many of them are gone that ended
-- longer ago than the age; of what Node ended only its beginning is known.
local before = now - tonumber(ARGV[6])
local left = tonumber(ARGV[7])
for _, id in ipairs(cmsgpack.unpack(ARGV[8])) do
  -- One that has expired has no state: it is gone for everybody already.
  local found = left > 0 and state_of(id) == STATE[ARGV[5]] and (fields(id, 'workers:finished', 'timestamp') or {})
  if found and whole(found[1] or found[2]) <= before then
    forget(id)
    left = left - 1
  end
end
finish()
return tonumber(ARGV[7]) - left
