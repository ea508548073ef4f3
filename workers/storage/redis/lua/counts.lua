-- Answers `{queued, scheduled, waiting, processing, failing, completed, failed, cancelled}`.
local due = redis.call('ZCOUNT', SCHEDULED, '-inf', now) + redis.call('ZCOUNT', FAILING, '-inf', now)
return {
  redis.call('ZCARD', READY) + redis.call('ZCARD', HELD) + due,
  redis.call('ZCOUNT', SCHEDULED, '(' .. string.format('%.0f', now), '+inf'),
  followed and redis.call('ZCARD', WAITING) or 0,
  redis.call('ZCARD', LEASES),
  redis.call('ZCOUNT', FAILING, '(' .. string.format('%.0f', now), '+inf'),
  redis.call('ZCOUNT', COMPLETED, '(' .. string.format('%.0f', now), '+inf'),
  redis.call('ZCOUNT', FAILED, '(' .. string.format('%.0f', now), '+inf'),
  redis.call('ZCOUNT', CANCELLED, '(' .. string.format('%.0f', now), '+inf'),
}
