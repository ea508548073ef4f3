"""Jobs on a Redis or Valkey server, in a layout of this package's own."""

from workers.storage.on_redis.master import client_of
from workers.storage.on_redis.server import check_target
from workers.storage.redis.storage import RedisStorage

__all__ = ["RedisStorage", "check_target", "client_of"]
