-- ARGV[2]: ids. Answers how many were not processing and are gone.
local count = 0
for _, id in ipairs(cmsgpack.unpack(ARGV[2])) do
  local found = lookup(id)
  if found and found.state ~= STATE.processing then
    forget(id, LINE_OF[found.state])
    if not LINE_OF[found.state] then
      step_out(found.job, found.run.place, id)
    end
    count = count + 1
  end
end
finish()
return count
