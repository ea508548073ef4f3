-- ARGV[2]: 1 to pause, 0 to resume.
if ARGV[2] == '1' then
  redis.call('HSET', META, 'paused', 1)
else
  redis.call('HDEL', META, 'paused')
  redis.call('DEL', SLEEPERS)
  redis.pcall('PUBLISH', BASE .. ':wake@' .. ARGV[1], cmsgpack.pack({}))
end
return 1
