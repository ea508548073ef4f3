-- ARGV[2]: how many rows that are due, 0 for all rows. Answers the time, when the next is due or 0, and the rows, each
-- `{name, revision, due or 0, body}`.
local names
if ARGV[2] == '0' then
  names = redis.call('HKEYS', CRONS)
else
  names = redis.call('ZRANGEBYSCORE', CRONS_DUE, '-inf', now, 'LIMIT', 0, ARGV[2])
end
local rows = {}
for _, name in ipairs(names) do
  local row = cron_row(name)
  if row then
    rows[#rows + 1] = { name, row[1], row[2], row[3] }
  end
end
local first = redis.call('ZRANGE', CRONS_DUE, 0, 0, 'WITHSCORES')
return cmsgpack.pack({ now, tonumber(first[2] or 0), rows })
