-- ARGV[2]: the settlements, [3]: see `settling.lua`. Answers a code for each.
local outcomes, broken = settle_all(cmsgpack.unpack(ARGV[2]))
if broken then
  return damaged(broken)
end
finish()
return cmsgpack.pack(outcomes)
