-- ARGV[2]: the jobs, some of which follow others, or have deduplication keys, [3]: as in enqueue.lua. Answers
-- `{-1, place, ids}` if a job is to follow unknown ones: then nothing was added.
local jobs = cmsgpack.unpack(ARGV[2])
local broken = foreign(WAITING, 'zset') or foreign(AFTER, 'hash')
if broken then
  return damaged(broken)
end
know_dependents()
local unknown = refused(jobs)
if unknown then
  return cmsgpack.pack(unknown)
end
local found = add(jobs, take_key, follow)
if ARGV[3] then
  waking = false
end
finish()
return cmsgpack.pack(found)
