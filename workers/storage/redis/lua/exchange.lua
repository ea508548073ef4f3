-- Settle, then claim. ARGV[2], [3]: as in `settle`; [4...]: as `claim` has them from [2] on. Answers what both do.
local broken = foreign(QUARANTINE, 'hash')
if broken then
  return damaged(broken)
end
local outcomes
outcomes, broken = settle_all(cmsgpack.unpack(ARGV[2]))
if broken then
  return damaged(broken)
end
close()
local claims = claim_for(ARGV[4], ARGV[5], tonumber(ARGV[6]), cmsgpack.unpack(ARGV[7]))
finish()
return { cmsgpack.pack(outcomes), cmsgpack.pack({ claims, told }) }
