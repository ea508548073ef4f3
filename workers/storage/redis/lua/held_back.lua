-- ARGV[2]: ids. Answers for each job 0, or the key that keeps it back and until when, 0: until another one ends.
local answer = {}
local queue_room, queue_opens = 1
if limited then
  queue_room, queue_opens = holding().room(QUEUE_KEY)
end
for at, id in ipairs(cmsgpack.unpack(ARGV[2])) do
  local found = lookup(id)
  answer[at] = 0
  if limited and found and found.state == STATE.queued then
    local key, room, opens = found.job.key, 1
    if string.sub(key, 1, 2) == '\30L' then
      room, opens = holding().room(key)
    end
    if room <= 0 then
      answer[at] = { key, opens or 0 }
    elseif queue_room <= 0 then
      answer[at] = { QUEUE_KEY, queue_opens or 0 }
    end
  end
end
return cmsgpack.pack(answer)
