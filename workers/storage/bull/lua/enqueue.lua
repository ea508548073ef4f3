-- ARGV[5]: the jobs. Answers for each 0, `{state, returnvalue, result as it was}`, or `{0}` where no job can be.
if broken_counter then
  return redis.error_reply(broken_counter)
end
local answers = {}
for at, job in ipairs(cmsgpack.unpack(ARGV[5])) do
  answers[at] = add(job)
end
finish()
return cmsgpack.pack(answers)
