"""Key-value stores whose entries expire, beside a queue; `RedisKvStore` is in `redis`, `SqlKvStore` in `sql`."""

from workers.kv.base import ConditionalKvStore, Key, KvStore, writes_conditionally
from workers.kv.memory import MemoryKvStore

__all__ = ["ConditionalKvStore", "Key", "KvStore", "MemoryKvStore", "writes_conditionally"]
