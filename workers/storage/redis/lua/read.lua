-- ARGV[2]: ids. Answers for each what `show` returns, or nothing.
local ids = cmsgpack.unpack(ARGV[2])
local records, packed = fetch(JOBS, ids), fetch(RUNS, ids)
local answer = {}
for at, id in ipairs(ids) do
  local found = find(id, records[at], packed[at])
  answer[at] = found and show(id, found, records[at], packed[at]) or 0
end
return cmsgpack.pack(answer)
