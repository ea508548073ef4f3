-- ARGV[2]: the jobs, [3]: given if somebody else will wake those who wait.
local found = add(cmsgpack.unpack(ARGV[2]))
if ARGV[3] then
  waking = false
end
finish()
return cmsgpack.pack(found)
