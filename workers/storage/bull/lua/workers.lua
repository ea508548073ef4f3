-- List workers. ARGV[5]: how long a worker is listed, in ms. Answers `{{worker, seen, ...}, {holder of an active job,
-- ...}, now}`; Node's workers show by the token of their locks.
local LOOKED_AT = 10000
local seen = redis.call('ZRANGEBYSCORE', SEEN, now - tonumber(ARGV[5]), '+inf', 'WITHSCORES')
local active, holders = redis.call('LRANGE', ACTIVE, 0, LOOKED_AT - 1), {}
for at, holder in ipairs(locks_of(active)) do
  local mark = (fields(active[at], CLAIM) or {})[1]
  local ours = mark and string.sub(mark, 1, 1) == '+' and (not holder or holder == string.sub(mark, 2, 1 + TOKEN_LENGTH))
  local who = ours and string.sub(mark, 2 + TOKEN_LENGTH) or holder
  if who then
    holders[#holders + 1] = who
  end
end
return cmsgpack.pack({ seen, holders, now })
