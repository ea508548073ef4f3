"""Work that many callers ask for at once, and that is done once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Generic, TypeVar

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
