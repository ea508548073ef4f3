-- Note in `ended` the jobs that others follow although they have ended: a version that knows of no dependents ended them.
-- Looks at some of them each time, and goes on there the next.
local LOOKED_AT = 200

local function find_stranded()
  local last = redis.call('HGET', META, 'checked')
  local from = last and last ~= '' and '(' .. last .. '\255' or '-'
  for _ = 1, LOOKED_AT do
    local first = redis.call('ZRANGEBYLEX', DEPENDENTS, from, '+', 'LIMIT', 0, 1)[1]
    local good, other = pcall(struct.unpack, '>I2c0', first or '')
    if not first or not good then
      redis.call('HDEL', META, 'checked')
      return
    end
    if other ~= '' then -- else it is what jobs are told
      local how, fault, result = end_of(other)
      if how then
        ended[#ended + 1] = { other, how, fault, result }
      end
    end
    last = text(other)
    from = '(' .. last .. '\255'
  end
  redis.call('HSET', META, 'checked', last)
end
