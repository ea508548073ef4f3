"""Work that many callers ask for at once, and that is done once; a small cache whose loads are such work."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from typing import Final, Generic, TypeVar

from workers.clock import monotonic

V = TypeVar("V")


class SingleFlight(Generic[V]):
    """Runs one piece of work per key at a time; whoever asks for it meanwhile shares its outcome.

    The work is a task of its own: if one of its callers is cancelled, the others still get the outcome. `close` ends
    work that nobody waits for any more.
    """

    def __init__(self) -> None:
        self._current: dict[str, asyncio.Task[V]] = {}
        self._tasks: set[asyncio.Task[V]] = set()

    async def run(self, key: str, work: Callable[[], Coroutine[object, object, V]]) -> V:
        """Run `work`, unless work for `key` is under way, and return the outcome of either."""
        task = self._current.get(key)
        if task is None:
            task = self._current[key] = asyncio.create_task(work())
            self._tasks.add(task)
            task.add_done_callback(lambda done: self._end(key, done))
        return await asyncio.shield(task)

    async def join(self, key: str) -> None:
        """Wait until work under way for `key` has ended, whatever came of it."""
        task = self._current.get(key)
        if task is not None:
            await asyncio.wait([task])

    def is_current(self, key: str) -> bool:
        """Tell the work that calls this whether it was not forgotten meanwhile."""
        return self._current.get(key) is asyncio.current_task()

    def forget(self, key: str) -> None:
        """Make the next caller start anew. Work under way still ends for those who wait for it."""
        self._current.pop(key, None)

    async def close(self) -> None:
        """Cancel all work, and wait for its end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _end(self, key: str, task: asyncio.Task[V]) -> None:
        self._tasks.discard(task)
        if self._current.get(key) is task:
            del self._current[key]
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not complain if nobody waits for it any more


MAX_ENTRIES: Final = 10_000


class LoadingCache(Generic[V]):
    """Values by text key, loaded on demand and kept for `ttl`; concurrent readers of one key share one load.

    It holds `max_entries` at most, and drops the least recently loaded ones first. A load that fails is not remembered.
    If a key is dropped while its load is under way, the next reader loads it again, so nobody sees a value older than
    the drop for long.
    """

    def __init__(self, load: Callable[[str], Awaitable[V]], *, ttl: timedelta, max_entries: int = MAX_ENTRIES) -> None:
        self._load = load
        self._max_entries = max_entries
        self._ttl = ttl.total_seconds()
        self._entries: OrderedDict[str, tuple[float, V]] = OrderedDict()
        self._loads: SingleFlight[V] = SingleFlight()

    async def get(self, key: str) -> V:
        """Return the value for `key`, at most `ttl` old."""
        entry = self._entries.get(key)
        if entry is not None and entry[0] > monotonic():
            return entry[1]
        return await self._loads.run(key, lambda: self._fill(key))

    def put(self, key: str, value: V) -> None:
        """Set the value of `key`. A load under way for it is older, and is not remembered."""
        self._loads.forget(key)
        self._remember(key, value)

    def drop(self, key: str) -> None:
        """Forget `key`: the next reader loads it anew."""
        self._entries.pop(key, None)
        self._loads.forget(key)

    async def close(self) -> None:
        """Cancel all loads, and wait for their end."""
        await self._loads.close()

    async def _fill(self, key: str) -> V:
        value = await self._load(key)
        if self._loads.is_current(key):  # not dropped meanwhile
            self._remember(key, value)
        return value

    def _remember(self, key: str, value: V) -> None:
        self._entries[key] = (monotonic() + self._ttl, value)
        self._entries.move_to_end(key)
        if len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)
