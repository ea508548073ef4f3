-- ARGV[2]: worker, [3]: random bytes, [4]: limit, [5]: names and leases; see `claiming.lua`. Answers `{claims, {id, why,
-- ...}}`: the second are the jobs that were set aside.
local broken = foreign(QUARANTINE, 'hash')
if broken then
  return damaged(broken)
end
local claims = claim_for(ARGV[2], ARGV[3], tonumber(ARGV[4]), cmsgpack.unpack(ARGV[5]))
finish()
return cmsgpack.pack({ claims, told })
