"""What recurs in a storage and what should, driven side by side."""

from __future__ import annotations

from collections import deque
from typing import Final

from workers.crons import Cron, Crons
from workers.crons.book import store
from workers.crons.ticks import CronTick, tick
from workers.jobs import CronRow
from workers.storage.base import Storage
from workers.testing.cases.crons import keeper
from workers.testing.expected import ExpectedQueue
from workers.testing.expected_crons import ExpectedCrons

REMEMBERED: Final = 6
"""Ticks that are tried again later."""


class DrivenCrons:
    """Each call goes to the storage and to the expectation, and what recurs is compared after it."""

    def __init__(self, storage: Storage, queue: ExpectedQueue) -> None:
        self._all = storage
        self._storage = keeper(storage)
        self._book = Crons(storage, _is_connected)
        self._queue = queue
        self._expected = ExpectedCrons()
        self._ticks: deque[CronTick] = deque(maxlen=REMEMBERED)

    async def store(self, cron: Cron) -> None:
        """Declare it, as a process does that starts."""
        look = await self._storage.crons()
        await store(self._all, [cron])
        self._expected.store(cron, look.now)
        await self._compare()

    async def change(self, verb: str, name: str) -> None:
        """Pause it, resume it or remove it."""
        look = await self._storage.crons()
        told = await getattr(self._book, verb)(name)
        assert told is getattr(self._expected, verb)(name, look.now), f"{verb} of {name!r} told {told}"
        await self._compare()

    async def tick(self) -> None:
        """Tick what is due, as a worker does; another worker that saw the same comes too late."""
        look = await self._storage.crons(due=True)
        expected = self._expected.tick(look.now)
        assert [row.name for row in look.rows] == [name for name, _ in expected]
        for row, (_, jobs) in zip(look.rows, expected, strict=True):
            following = tick(row, look.now)
            assert await self._storage.replace_cron(following.row, jobs=following.jobs)
            self._queue.enqueue(jobs)
            self._ticks.append(following)
        await self.tick_late()

    async def tick_late(self) -> None:
        """Replace what others have replaced already: nothing happens."""
        for one in self._ticks:
            assert not await self._storage.replace_cron(one.row, jobs=one.jobs), f"{one.row} was replaced twice"
        await self._compare()

    async def _compare(self) -> None:
        look = await self._storage.crons()
        kept = sorted(self._expected.kept.items())
        assert list(map(_told, look.rows)) == [(name, one.revision, one.due) for name, one in kept]
        dates = [one.due for _, one in kept if one.due is not None]
        assert look.next_due == min(dates, default=None)
        statuses = [(one.cron, one.due, one.paused) for one in await self._book.list()]
        assert statuses == [(one.cron, one.due, one.paused) for _, one in kept if not one.removed]


def _told(row: CronRow) -> tuple[str, int, object]:
    return row.name, row.revision, row.due


async def _is_connected() -> None:
    """Do nothing: the harness has connected the storage."""
