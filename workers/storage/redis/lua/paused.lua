return redis.call('HEXISTS', META, 'paused')
