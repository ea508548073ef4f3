"""Concurrent calls share round trips: what is asked while one is under way goes into the next, together.

Groups form by themselves: those who ask in the same turn of the event loop are one, and so are those who ask while
the one call under way lasts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from workers.errors import StorageUnavailable

T = TypeVar("T")
R = TypeVar("R")


class Batcher(Generic[T, R]):
    """Asks `call` about up to `limit` items at once; it answers in their order.

    What makes a whole group fail is tried again one by one, so that it costs no neighbour anything; a storage that did
    not answer is not.
    """

    def __init__(self, call: Callable[[Sequence[T]], Awaitable[Sequence[R]]], limit: int) -> None:
        self._call = call
        self._limit = limit
        self._waiting: deque[tuple[T, asyncio.Future[R]]] = deque()
        self._serving: asyncio.Task[None] | None = None

    async def ask(self, item: T) -> R:
        """The answer for `item`; cancelled before its turn, it is not asked about."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._serving is None:
            self._serve_next()
        return await future

    def _serve_next(self) -> None:
        """Whoever waits is served by a task of its own, so that all who ask in the same moment are served together."""
        while self._waiting and self._waiting[0][1].done():
            self._waiting.popleft()
        self._serving = asyncio.create_task(self._serve(), name="batched-calls") if self._waiting else None

    async def _serve(self) -> None:
        taken = [self._waiting.popleft() for _ in range(min(self._limit, len(self._waiting)))]
        try:
            await self._answer([(item, future) for item, future in taken if not future.done()])
        finally:
            self._serve_next()

    async def _answer(self, group: list[tuple[T, asyncio.Future[R]]]) -> None:
        if not group:
            return
        try:
            answers = await self._call([item for item, _ in group])
        except Exception as error:
            if len(group) == 1 or isinstance(error, StorageUnavailable):
                for _, future in group:
                    if not future.done():
                        future.set_exception(error)
                return
            for entry in group:
                await self._answer([entry])
            return
        for (_, future), answer in zip(group, answers, strict=True):
            if not future.done():
                future.set_result(answer)
