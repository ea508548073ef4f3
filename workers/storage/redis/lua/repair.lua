-- Set aside keys in the place of the queue's own. Answers `{name, why, ...}`.
local function mend(key, kind)
  local why = foreign(key, kind)
  if why then
    clear_away(key, string.sub(key, #BASE + 2), why)
  end
end

mend(QUARANTINE, 'hash') -- first, because everything else is noted there
mend(THROTTLED, 'zset')
mend(WAITING, 'zset')
mend(AFTER, 'hash')
mend(PASSING, 'zset')
mend(FILLING, 'zset')
mend(OPENING, 'zset')
for at = 1, #KEPT do
  mend(KEPT[at], kind_of(at))
end
return cmsgpack.pack(told)
