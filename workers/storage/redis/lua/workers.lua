-- Answers `{worker, seen, claims, ...}`.
local counts, answer = holders(), {}
local seen = redis.call('ZRANGE', WORKERS, 0, -1, 'WITHSCORES')
for at = 1, #seen, 2 do
  answer[#answer + 1] = seen[at]
  answer[#answer + 1] = tonumber(seen[at + 1])
  answer[#answer + 1] = counts[seen[at]] or 0
end
return cmsgpack.pack(answer)
