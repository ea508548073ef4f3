-- Answer an error if the queue is surely one of Bull, and else what speaks for that, '' for nothing: jobs like Bull's, or a
-- key that BullMQ has had no use for since version 4. ARGV[1]: prefix of the queue's keys.
local P = ARGV[1]
local records = sample(P, 'data', 'opts', 'attempts', 'name')
local owned = is_unannounced(P) and owned_by_bull(P, records)
if owned then
  return owned
end

local why
for _, job in ipairs(records) do
  local opts = options_like_bulls(job[2])
  if job[4] == '__default__' or opts and not opts['repeat'] and opts.attempts ~= 0 then
    why = 'jobs like theirs'
  end
end
for _, key in ipairs({ 'priority', 'meta-paused' }) do
  why = redis.call('EXISTS', P .. key) == 1 and 'a key `' .. key .. '`' or why
end
return why and 'the queue ' .. P .. '... has ' .. why .. ': if workers of Bull 3 or newer use it, leave it to them' or ''
