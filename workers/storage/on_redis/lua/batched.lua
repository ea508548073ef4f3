-- unpack() takes at most some 8 000 values.
local AT_ONCE = 2000

local function batched(command, key, values)
  for start = 1, #values, AT_ONCE do
    redis.call(command, key, unpack(values, start, math.min(start + AT_ONCE - 1, #values)))
  end
end
