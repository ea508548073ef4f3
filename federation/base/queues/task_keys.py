"""Where tasks' deduplication keys are kept with BullMQ and Bull, whose queues keep none of ours."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

from redis.asyncio import Redis

from workers.kv.redis import RedisKvStore

if TYPE_CHECKING:
    from workers.kv import Key


class TaskKeys:
    """A `ConditionalKvStore` in the Redis of the queues, beside them.

    The first use connects it, `close` disconnects it.

    Raises:
        StorageUnavailable: every method, while Redis does not answer.
    """

    def __init__(self, place: Redis | str, *, prefix: str) -> None:
        self._store = RedisKvStore(place, prefix=prefix)
        self._connecting = asyncio.Lock()
        self._connected = False

    async def get(self, key: Key) -> bytes | None:
        return await (await self._opened()).get(key)

    async def set(self, key: Key, value: bytes, *, ttl: timedelta) -> None:
        await (await self._opened()).set(key, value, ttl=ttl)

    async def set_if_absent(self, key: Key, value: bytes, *, ttl: timedelta) -> bytes | None:
        return await (await self._opened()).set_if_absent(key, value, ttl=ttl)

    async def compare_and_set(self, key: Key, expected: bytes, value: bytes, *, ttl: timedelta) -> bool:
        return await (await self._opened()).compare_and_set(key, expected, value, ttl=ttl)

    async def compare_and_delete(self, key: Key, expected: bytes) -> bool:
        return await (await self._opened()).compare_and_delete(key, expected)

    async def close(self) -> None:
        """Disconnect. A second call does nothing."""
        if self._connected:
            self._connected = False
            await self._store.disconnect()

    async def _opened(self) -> RedisKvStore:
        async with self._connecting:
            if not self._connected:
                await self._store.connect()
                self._connected = True
        return self._store
