-- The type of each key of a queue. BullMQ's scripts rely on it: a script that meets another type stops half-way, and a
-- job that it had taken out of one line is then in none.
local KINDS = {
  ['wait'] = 'list', ['paused'] = 'list', ['active'] = 'list', ['stalled'] = 'set', ['meta'] = 'hash',
  ['delayed'] = 'zset', ['prioritized'] = 'zset', ['waiting-children'] = 'zset', ['completed'] = 'zset',
  ['failed'] = 'zset', ['repeat'] = 'zset', ['marker'] = 'zset', ['events'] = 'stream', ['id'] = 'string',
  ['pc'] = 'string', ['limiter'] = 'string', ['stalled-check'] = 'string', ['workers:seen'] = 'zset',
  ['workers:cancel-requests'] = 'stream', ['workers:cancelled'] = 'zset', ['workers:quarantine'] = 'hash',
  ['workers:removed-crons'] = 'hash', ['workers:limits'] = 'hash',
}

-- Return an error that names the first of these keys that has the wrong type.
local function damage(prefix, names)
  for _, name in ipairs(names) do
    local why = foreign(prefix .. name, KINDS[name])
    if why then
      return redis.error_reply('DAMAGED ' .. why)
    end
  end
end
