-- ARGV[2]: an id, [3]: limit. Answers the ids of jobs that wait for this one.
local prefix, waiting = text(ARGV[2]), {}
for at, value in ipairs(redis.call('ZRANGEBYLEX', DEPENDENTS, '[' .. prefix, '(' .. prefix .. '\255', 'LIMIT', 0, ARGV[3])) do
  waiting[at] = string.sub(value, #prefix + 1)
end
return waiting
