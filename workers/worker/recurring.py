"""Ticks what recurs in the queue when it is due: every worker does so, and one of them enqueues each time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Final

from workers.crons import Cron
from workers.crons.book import store
from workers.crons.ticks import tick
from workers.errors import StorageError, StorageUnavailable
from workers.jobs import CronRow
from workers.storage.abilities import KeepsCrons
from workers.storage.base import Storage

LOOK_SECONDS: Final = 30.0
"""How long a worker relies on what it last saw; somebody may have declared more meanwhile."""
SHORTEST_PAUSE_SECONDS: Final = 0.01


class Ticker:
    """Stores what this worker's process declared, then looks whenever something is due, and every 30 s at least."""

    def __init__(self, storage: Storage, crons: Iterable[Cron], *, report: Callable[[Exception], None]) -> None:
        self._storage = storage
        self._declared = tuple(crons)
        self._report = report

    async def run(self) -> None:
        """Tick until cancelled. A storage without `capabilities.crons` is left alone."""
        if not self._storage.capabilities.crons:
            await asyncio.Event().wait()
        while True:
            pause = LOOK_SECONDS
            try:
                pause = 0.0 if await self._declare() else await self.tick()
            except (StorageUnavailable, StorageError) as error:
                self._report(error)
            # Jittered, so that many workers do not come at the same moment, but never early.
            pause = max(min(pause, LOOK_SECONDS), SHORTEST_PAUSE_SECONDS)
            await asyncio.sleep(pause * random.uniform(1.0, 1.001))  # noqa: S311 - spreads load, guards nothing

    async def _declare(self) -> bool:
        """Store what is not stored yet, each for itself; tell whether something was."""
        declared, self._declared = self._declared, ()
        for at, cron in enumerate(declared):
            try:
                await store(self._storage, [cron])
            except StorageUnavailable:
                self._declared += declared[at:]
                raise
            except StorageError as error:  # a newer version wrote it
                self._report(error)
        return bool(declared)

    async def tick(self) -> float:
        """Tick what is due, and return how many seconds later to look again.

        What a storage repeats by itself is left to it.
        """
        if not isinstance(self._storage, KeepsCrons):
            return LOOK_SECONDS
        look = await self._storage.crons(due=True)
        ticked = [await self._tick(self._storage, row, look.now) for row in look.rows] if look.rows else []
        if ticked:
            return 0 if any(ticked) else LOOK_SECONDS
        return LOOK_SECONDS if look.next_due is None else (look.next_due - look.now).total_seconds()

    async def _tick(self, storage: KeepsCrons, row: CronRow, now: datetime) -> bool:
        """Tick one row, or leave it to whoever did, or can; tell whether it can tick here."""
        try:
            following = tick(row, now)
        except StorageError as error:
            self._report(error)
            return False
        await storage.replace_cron(following.row, jobs=following.jobs)
        return True
