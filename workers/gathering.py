"""Concurrent calls share round trips: what is asked while a call is under way goes into the next one, together.

A single caller is served at once, in its own task. Groups form by themselves under load, as there is never more than
one call under way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from workers.errors import StorageUnavailable

T = TypeVar("T")
R = TypeVar("R")


class Gathering(Generic[T, R]):
    """Asks `call` about up to `limit` items at once; it answers in their order.

    What makes a whole group fail is tried again one by one, so that it costs no neighbour anything; a storage that did
    not answer is not.
    """

    def __init__(self, call: Callable[[Sequence[T]], Awaitable[Sequence[R]]], limit: int) -> None:
        self._call = call
        self._limit = limit
        self._waiting: deque[tuple[T, asyncio.Future[R]]] = deque()
        self._serving: asyncio.Task[None] | None = None
        self._busy = False

    async def ask(self, item: T) -> R:
        """The answer for `item`; cancelled before its turn, it is not asked about."""
        if self._busy:
            future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
            self._waiting.append((item, future))
            return await future
        self._busy = True
        try:
            return (await self._call([item]))[0]
        finally:
            self._hand_on()

    def _hand_on(self) -> None:
        """Whoever waits still is served next, by a task of its own."""
        while self._waiting and self._waiting[0][1].done():
            self._waiting.popleft()
        self._busy = bool(self._waiting)
        self._serving = asyncio.create_task(self._serve(), name="gathered-calls") if self._busy else None

    async def _serve(self) -> None:
        taken = [self._waiting.popleft() for _ in range(min(self._limit, len(self._waiting)))]
        try:
            await self._answer([(item, future) for item, future in taken if not future.done()])
        finally:
            self._hand_on()

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
