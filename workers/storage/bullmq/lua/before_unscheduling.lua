-- In front of BullMQ's removeJobScheduler, whose keys and arguments these are: remember which version of ours is removed.
local broken = damage(ARGV[2], { 'repeat', 'delayed', 'events', 'workers:removed-crons' })
if broken then
  return broken
end
local good, options = pcall(cjson.decode, redis.call('HGET', KEYS[1] .. ':' .. ARGV[1], 'opts') or '')
local cron = good and type(options) == 'table' and options['cron']
if type(cron) == 'table' and type(cron.version) == 'number' then
  redis.call('HSET', ARGV[2] .. 'workers:removed-crons', ARGV[1], string.format('%.0f', cron.version))
end
