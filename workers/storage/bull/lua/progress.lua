-- Store progress. ARGV[5]: reports, each `{id, token, number, exact value}`; those of claims without their job are
-- ignored.
for _, report in ipairs(cmsgpack.unpack(ARGV[5])) do
  local id, token = report[1], report[2]
  local found = fields(id, CLAIM)
  local mark, holder = found and found[1], redis.call('GET', P .. id .. ':lock')
  if mark and string.sub(mark, 1, 1 + TOKEN_LENGTH) == '+' .. token and (not holder or holder == token) then
    redis.call('HMSET', P .. id, 'progress', report[3], 'workers:progress', report[4])
    tell(EVENT.progress, id)
    emit('progress', id, report[3])
  end
end
finish()
