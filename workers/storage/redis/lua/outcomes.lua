-- ARGV[2]: an id, [3]: the other id at which an answer before this one ended, or nothing, [4]: limit. Answers how those
-- ended that the job came after, each as queue.lua describes it, from the other's id on.
local prefix = told_to(ARGV[2])
local from = ARGV[3] == '' and '[' .. prefix or '(' .. prefix .. text(ARGV[3]) .. '\255'
local told = redis.call('ZRANGEBYLEX', DEPENDENTS, from, '(' .. prefix .. '\255', 'LIMIT', 0, ARGV[4])
for at, value in ipairs(told) do
  told[at] = string.sub(value, #prefix + 1)
end
return told
