-- Enqueue jobs. ARGV[5]: the jobs. Answers for each 0, `{state, returnvalue, exact result}`, or `{0}` if there can be
-- no such job.
if broken_counter then
  return redis.error_reply(broken_counter)
end
local answers = {}
for at, job in ipairs(cmsgpack.unpack(ARGV[5])) do
  answers[at] = add(job)
end
finish()
return cmsgpack.pack(answers)
