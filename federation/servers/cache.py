"""A small cache for values read from the database again and again, with one load at a time per key."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Generic, TypeVar

V = TypeVar("V")

MAX_ENTRIES = 10_000


class LoadingCache(Generic[V]):
    """Values by text key, loaded on demand and kept for `ttl`; concurrent readers of one key share one load.

    Bounded to 10 000 entries, the least recently loaded go first. A load that fails is not remembered. A key dropped
    while its load is under way is loaded again by the next reader, so nobody sees a value older than the drop for long.
    """

    def __init__(self, load: Callable[[str], Awaitable[V]], *, ttl: timedelta) -> None:
        self._load = load
        self._ttl = ttl.total_seconds()
        self._entries: OrderedDict[str, tuple[float, V]] = OrderedDict()
        self._loading: dict[str, asyncio.Task[V]] = {}

    async def get(self, key: str) -> V:
        """The value for `key`, at most `ttl` old."""
        entry = self._entries.get(key)
        if entry is not None and entry[0] > time.monotonic():
            return entry[1]
        task = self._loading.get(key)
        if task is None:
            task = self._loading[key] = asyncio.create_task(self._fill(key))
        # Shielded: one reader's cancellation must not fail the others that wait for the same load.
        return await asyncio.shield(task)

    def drop(self, key: str) -> None:
        """The next reader loads `key` anew."""
        self._entries.pop(key, None)
        self._loading.pop(key, None)

    async def _fill(self, key: str) -> V:
        task = asyncio.current_task()
        try:
            value = await self._load(key)
            if self._loading.get(key) is task:  # not dropped meanwhile
                self._entries[key] = (time.monotonic() + self._ttl, value)
                self._entries.move_to_end(key)
                if len(self._entries) > MAX_ENTRIES:
                    self._entries.popitem(last=False)
            return value
        finally:
            if self._loading.get(key) is task:
                del self._loading[key]
