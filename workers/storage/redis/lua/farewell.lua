-- ARGV[2]: the worker that has stopped.
redis.call('ZREM', WORKERS, ARGV[2])
return 1
