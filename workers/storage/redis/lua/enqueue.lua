-- ARGV[2]: the jobs, which `alone.lua` has unpacked, [3]: given if somebody else will wake those who wait.
local found = add(jobs)
if ARGV[3] then
  waking = false
end
finish()
return cmsgpack.pack(found)
