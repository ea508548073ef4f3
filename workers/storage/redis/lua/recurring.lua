-- What recurs: CRONS has a row for each name, packed as `{revision, due or 0, body}`, CRONS_DUE the names by when they are
-- due, in microseconds.
do
  local broken = foreign(CRONS, 'hash') or foreign(CRONS_DUE, 'zset')
  if broken then
    return damaged(broken)
  end
end

local function cron_row(name)
  local packed = redis.call('HGET', CRONS, name)
  local good, row = pcall(cmsgpack.unpack, packed or '')
  return packed and good and type(row) == 'table' and row
end
