-- ARGV[2]: the jobs, some of which have deduplication keys, [3]: as in enqueue.lua.
need_room()
local found = add(cmsgpack.unpack(ARGV[2]), take_key)
if ARGV[3] then
  waking = false
end
finish()
return cmsgpack.pack(found)
