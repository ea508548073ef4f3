-- ARGV[2]: the jobs.
local found = add(cmsgpack.unpack(ARGV[2]))
finish()
return cmsgpack.pack(found)
