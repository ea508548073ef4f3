-- ARGV[2]: an id. Answers the ids of the jobs that this one still waits for.
local packed, left = redis.call('HGET', AFTER, 'A' .. ARGV[2]), {}
local good, others = pcall(cmsgpack.unpack, string.sub(packed or '', 2))
if packed and good and type(others) == 'table' then
  for _, other in ipairs(others) do
    if redis.call('ZSCORE', DEPENDENTS, text(other) .. ARGV[2]) then
      left[#left + 1] = other
    end
  end
end
return left
