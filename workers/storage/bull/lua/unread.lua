-- Answers `{id, token, ...}`: the active jobs whose claim has a token that begins with ARGV[5].
local found, ids = {}, redis.call('LRANGE', ACTIVE, 0, -1)
local holders = locks_of(ids)
for at, id in ipairs(ids) do
  local token = holders[at]
  if token and string.sub(token, 1, #ARGV[5]) == ARGV[5] then
    found[#found + 1] = id
    found[#found + 1] = token
  end
end
return cmsgpack.pack(found)
