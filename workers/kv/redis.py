"""A key-value store on Redis or Valkey."""

from __future__ import annotations

from datetime import timedelta
from types import TracebackType
from typing import Final, Self

from redis.asyncio import Redis

from workers.errors import StorageError
from workers.kv.base import Key, check_value, encode_key, ttl_ms
from workers.storage.on_redis.scripts import Script
from workers.storage.on_redis.server import RedisServer
from workers.storage.on_redis.wire import Reply

# Scripts, because each is one step that returns the value found: `SET NX GET` needs Redis 7.
_SET_IF_ABSENT: Final = Script.of("""
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return false end
return redis.call('GET', KEYS[1])
""")
_COMPARE_AND_SET: Final = Script.of("""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
""")
_COMPARE_AND_DELETE: Final = Script.of("""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
""")


class RedisKvStore:
    """A `ConditionalKvStore` in the keys `<prefix>:<part>/<part>...` of a Redis (6.2 or newer) or Valkey server.

    `target` is a URL (`redis://`, `rediss://`, `unix://`, or as in `redis_urls`; on a cluster the prefix has to be in
    braces) or a client. A client's settings are used, and its connections are left alone. `timeout` is how long
    it may be silent.
    The server's clock decides what has expired, and the server removes it.

    Raises:
        StorageError: a target that is no Redis URL.
    """

    def __init__(
        self, target: str | Redis, *, prefix: str = "workers-kv", timeout: timedelta = timedelta(seconds=5)
    ) -> None:
        self._prefix = prefix
        self._server = RedisServer(
            target,
            timeout,
            base=f"{prefix}:".encode(),
            scripts=lambda: (_SET_IF_ABSENT, _COMPARE_AND_SET, _COMPARE_AND_DELETE),
            text=False,
        )

    def __repr__(self) -> str:
        return f"RedisKvStore(prefix={self._prefix!r})"

    async def connect(self) -> None:
        """Make sure that the server answers. Counted: each call needs one `disconnect`."""
        await self._server.open()

    async def disconnect(self) -> None:
        """Give up one use; with the last one the connections are closed."""
        await self._server.close()

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.disconnect()

    async def get(self, key: Key) -> bytes | None:
        found: bytes | None = await self._run("GET", self._place(key))
        return found

    async def set(self, key: Key, value: bytes, *, ttl: timedelta) -> None:
        check_value(value)
        await self._run("SET", self._place(key), value, "PX", ttl_ms(ttl))

    async def set_if_absent(self, key: Key, value: bytes, *, ttl: timedelta) -> bytes | None:
        check_value(value)
        found: bytes | None = await self._server.call(_SET_IF_ABSENT, self._place(key), value, ttl_ms(ttl))
        return found

    async def compare_and_set(self, key: Key, expected: bytes, value: bytes, *, ttl: timedelta) -> bool:
        check_value(value)
        return bool(await self._server.call(_COMPARE_AND_SET, self._place(key), expected, value, ttl_ms(ttl)))

    async def compare_and_delete(self, key: Key, expected: bytes) -> bool:
        return bool(await self._server.call(_COMPARE_AND_DELETE, self._place(key), expected))

    def _place(self, key: Key) -> str:
        return f"{self._prefix}:{encode_key(key)}"

    async def _run(self, *command: str | bytes | int) -> Reply:
        reply = (await self._server.run([command]))[0]
        if isinstance(reply, StorageError):
            raise reply
        return reply
