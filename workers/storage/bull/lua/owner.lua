-- Answer an error if the queue is another library's. Behind `keys` alone: a damaged queue can still be opened, and mended.
local others = other_owner() or ended_elsewhere(COMPLETED) or ended_elsewhere(FAILED)
if others then
  return redis.error_reply(others)
end
for _, job in ipairs(sample(P, 'name', 'attempts')) do
  if is_later(job[1], job[2]) then
    return redis.error_reply(LATER_JOB)
  end
end
