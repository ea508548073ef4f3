-- Call a function for one of many jobs, whose neighbours its error is not to stop; return its answer, or the error.
local function attempt(step, keys, arguments)
  local good, answer = pcall(step, keys, arguments)
  if good or type(answer) == 'table' then
    return answer, good
  end
  return redis.error_reply((string.gsub(tostring(answer), '[\r\n]', ' '))), false -- a server before 7 raises text
end
