-- Read jobs. ARGV[5]: jobs, each `{ids}` it may have. Answers for each 0, or what `shown` returns.
local answer = {}
for at, ids in ipairs(cmsgpack.unpack(ARGV[5])) do
  answer[at] = shown(ids) or 0
end
return cmsgpack.pack(answer)
