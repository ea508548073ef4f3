-- ARGV[2]: the jobs, some of which have deduplication keys.
need_room()
local found = add(cmsgpack.unpack(ARGV[2]), take_key)
finish()
return cmsgpack.pack(found)
