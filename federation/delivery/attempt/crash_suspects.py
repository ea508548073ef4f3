"""Keeps suspects, deliveries that may crash the process, apart from all others, so that few can have caused a crash.

A delivery becomes one in `ledger/statements.py`, once too many workers died over it; the group that runs together is
halved after each further crash. `held/sweeper.py` lets one group go at a time.

Theory of operation. There are two sides, and only attempts of one side are inside at a time. An attempt from the other
side waits until the last one inside has left. While it waits, no further attempt of the inner side enters, so neither
side waits longer than an attempt may take. The last one to leave lets in all that wait, in one step: they count as
inside before they run. Nearly always there are no suspects, and entering costs an addition.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class CrashSuspects:
    """Admits attempts at suspects, or at all other deliveries, but never both at a time."""

    def __init__(self) -> None:
        self._inside = 0
        self._suspects_inside = False
        self._waiting: dict[bool, list[asyncio.Future[None]]] = {True: [], False: []}

    @asynccontextmanager
    async def enter(self, *, suspect: bool) -> AsyncIterator[None]:
        """Enter, and stay inside for the block, together with attempts of the same side only."""
        if not self._inside or (self._suspects_inside is suspect and not self._waiting[not suspect]):
            self._inside += 1
            self._suspects_inside = suspect
        else:
            await self._wait(suspect)
        try:
            yield
        finally:
            self._leave()

    async def _wait(self, suspect: bool) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[suspect].append(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # let in just as we gave up
                self._leave()
            else:
                self._waiting[suspect].remove(turn)
            raise

    def _leave(self) -> None:
        self._inside -= 1
        if self._inside:
            return
        other = not self._suspects_inside
        self._suspects_inside = other if self._waiting[other] else not other
        waiting, self._waiting[self._suspects_inside] = self._waiting[self._suspects_inside], []
        self._inside = len(waiting)
        for turn in waiting:
            turn.set_result(None)
