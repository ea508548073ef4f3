-- ARGV[5]: the worker that has stopped.
redis.call('ZREM', SEEN, ARGV[5])
return 1
