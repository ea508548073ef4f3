return redis.call('EXISTS', META_PAUSED)
