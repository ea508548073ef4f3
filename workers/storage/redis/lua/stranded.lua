-- Note in `ended` the jobs that others follow although they have ended: a version that knows of no dependents ended them.
-- Forget what jobs were told that such a version has removed. Looks at some each time, and goes on there the next.
local LOOKED_AT = 200

local function find_stranded()
  local last = redis.call('HGET', META, 'checked')
  local from = last and last ~= '' and '(' .. last .. '\255' or '-'
  for _ = 1, LOOKED_AT do
    local first = redis.call('ZRANGEBYLEX', DEPENDENTS, from, '+', 'LIMIT', 0, 1)[1]
    local good, other, finish = pcall(struct.unpack, '>I2c0', first or '')
    local told = other == ''
    if good and told then
      good, other = pcall(struct.unpack, '>I2c0', first, finish)
    end
    if not first or not good then
      redis.call('HDEL', META, 'checked')
      return
    end
    last = told and told_to(other) or text(other)
    if not told then
      local how, fault, result = end_of(other)
      if how then
        ended[#ended + 1] = { other, how, fault, result }
      end
    elseif redis.call('HEXISTS', JOBS, other) == 0 then
      forget_told(other)
    end
    from = '(' .. last .. '\255'
  end
  redis.call('HSET', META, 'checked', last)
end
