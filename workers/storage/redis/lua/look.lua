-- Look for work before a wait. ARGV[2...]: the names to wait for. Answers nothing when a claim for them may succeed.
-- Otherwise they are noted as asleep, and the answer is the time until the next delayed job is due, -1 for none.
local room, opens = 1
if limited then
  room, opens = holding().room(QUEUE_KEY)
end
if room > 0 and redis.call('HEXISTS', META, 'paused') == 0 then
  for at = 2, #ARGV do
    for _, name in ipairs({ ARGV[at], URGENT .. ARGV[at] }) do
      local prefix = text(name)
      local range = name == '*' and { '-', '+' } or { '[' .. prefix, '(' .. prefix .. '\255' }
      if redis.call('ZRANGEBYLEX', READY, range[1], range[2], 'LIMIT', 0, 1)[1] then
        return false
      end
    end
  end
end
local asleep = {}
for at = 2, #ARGV do
  asleep[#asleep + 1] = ARGV[at]
  asleep[#asleep + 1] = '1'
end
batched('HSET', SLEEPERS, asleep)
local due = -1
if redis.call('HEXISTS', META, 'paused') == 0 then
  if room <= 0 and opens then
    due = math.max(0, opens - now)
  end
  for _, line in ipairs(limited and { SCHEDULED, FAILING, OPENING } or { SCHEDULED, FAILING }) do
    local first = tonumber(redis.call('ZRANGE', line, 0, 0, 'WITHSCORES')[2])
    if first and (due < 0 or first - now < due) then
      due = math.max(0, first - now)
    end
  end
end
if due == 0 then
  return false
end
return string.format('%.0f', due)
