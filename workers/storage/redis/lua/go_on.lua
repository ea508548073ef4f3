-- Let an unfinished job go on from outside. ARGV[2]: the next link, as for add.lua, [3]: its number. Answers the state found,
-- 0 for none, -1 if the number does not follow that of the current link.
local new = cmsgpack.unpack(ARGV[2])
local id = new[1]
local found = lookup(id)
if not found then
  return 0
end
if not LINE_OF[found.state] then
  if found.job.link + 1 ~= tonumber(ARGV[3]) then
    return -1
  end
  need_room()
  take(id, found.job, found.run)
  found.run.token = NO_TOKEN
  continue(id, found.job, found.run, new)
end
finish()
return found.state
