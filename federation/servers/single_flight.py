"""Work that many ask for at once and that is done once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Generic, TypeVar

V = TypeVar("V")


class SingleFlight(Generic[V]):
    """Runs one piece of work per key at a time; who asks meanwhile shares its outcome.

    The work is a task of its own: cancelling one of those who wait for it does not fail the others. `close` ends what
    nobody waited for any more.
    """

    def __init__(self) -> None:
        self._current: dict[str, asyncio.Task[V]] = {}
        self._tasks: set[asyncio.Task[V]] = set()

    async def run(self, key: str, work: Callable[[], Coroutine[object, object, V]]) -> V:
        """The outcome of `work`, or of the work under way for `key`."""
        task = self._current.get(key)
        if task is None:
            task = self._current[key] = asyncio.create_task(work())
            self._tasks.add(task)
            task.add_done_callback(lambda done: self._end(key, done))
        return await asyncio.shield(task)

    def is_current(self, key: str) -> bool:
        """Asked by the work itself: whether it was not forgotten meanwhile."""
        return self._current.get(key) is asyncio.current_task()

    def forget(self, key: str) -> None:
        """Who asks next starts anew; what is under way ends for those who wait for it."""
        self._current.pop(key, None)

    async def close(self) -> None:
        """Nothing is under way any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _end(self, key: str, task: asyncio.Task[V]) -> None:
        self._tasks.discard(task)
        if self._current.get(key) is task:
            del self._current[key]
        if not task.cancelled():
            task.exception()  # seen, even if everybody who waited for it is gone
