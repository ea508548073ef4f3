"""Jobs on a Redis or Valkey server, in a layout of this package's own."""

from workers.storage.redis.storage import RedisStorage

__all__ = ["RedisStorage"]
