-- Remove jobs. ARGV[2]: ids, [3]: 1 to remove running ones too. Answers how many were removed.
local count = 0
for _, id in ipairs(cmsgpack.unpack(ARGV[2])) do
  local found = lookup(id)
  if found and (found.state ~= STATE.processing or ARGV[3] == '1') then
    local line = LINE_OF[found.state]
    forget(id, line)
    if not line then
      unmark(id)
      take(id, found.job, found.run)
      if followed then
        ended[#ended + 1] = { id, 0 }
      end
    end
    count = count + 1
  end
end
finish()
return count
