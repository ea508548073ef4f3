"""What should recur in a queue, and which jobs should come of it: written from the contract, for two kinds of times.

`DrivenCrons` drives a storage and the expectation side by side.

A `Cron` here has a period, or the pattern `HOURLY` in UTC.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from workers.crons import Cron, Crons, Missed
from workers.crons.book import store
from workers.crons.ticks import CronTick, tick
from workers.jobs import CronRow, NewJob
from workers.storage.base import Storage
from workers.testing.cases.crons import keeper
from workers.testing.expected import ExpectedQueue

HOURLY: Final = "0 * * * *"
_HOUR: Final = timedelta(hours=1)
_STILL_KEPT: Final = timedelta(minutes=1)
"""How late a time may be that counts as kept, where missed ones are skipped."""


@dataclass(slots=True, kw_only=True)
class ExpectedCron:
    """What recurs; `last` is the end of the time that ticked."""

    cron: Cron
    due: datetime | None
    revision: int = 1
    paused: bool = False
    removed: bool = False
    last: datetime | None = None


class ExpectedCrons:
    """What there should be, by name. All times are those of the storage."""

    def __init__(self) -> None:
        self.kept: dict[str, ExpectedCron] = {}

    def store(self, cron: Cron, now: datetime) -> None:
        """Keep the definition, unless there is one of its version or a higher one."""
        kept = self.kept.get(cron.name)
        if kept is None:
            self.kept[cron.name] = ExpectedCron(cron=cron, due=_first_after(cron, now))
        elif kept.cron.version < cron.version:
            as_before = not kept.removed and (kept.cron.pattern, kept.cron.every) == (cron.pattern, cron.every)
            if not as_before and not kept.paused:
                kept.due = _first_after(cron, max(now, kept.last or now))
            kept.cron, kept.removed, kept.revision = cron, False, kept.revision + 1

    def pause(self, name: str, now: datetime) -> bool:
        """Keep it from being due, and return what `pause` should answer."""
        kept = self._change(name)
        if kept is not None:
            kept.paused, kept.due = True, None
        return kept is not None

    def resume(self, name: str, now: datetime) -> bool:
        """Let it be due for the first time from now, unless it is due, and return what `resume` should answer."""
        kept = self._change(name)
        if kept is not None and (kept.paused or kept.due is None or kept.due > now):
            kept.paused, kept.due = False, _first_after(kept.cron, now)
        return kept is not None

    def remove(self, name: str, now: datetime) -> bool:
        """Keep nothing but its version, and return what `remove` should answer."""
        kept = self._change(name)
        if kept is not None:
            kept.removed, kept.paused, kept.due = True, False, None
        return kept is not None

    def _change(self, name: str) -> ExpectedCron | None:
        kept = self.kept.get(name)
        if kept is None or kept.removed:
            return None
        kept.revision += 1
        return kept

    def tick(self, now: datetime) -> list[tuple[str, list[NewJob]]]:
        """Turn what is due, the longest due first, and return the names with the jobs to be enqueued for each."""
        due = sorted((kept.due, name) for name, kept in self.kept.items() if kept.due is not None and kept.due <= now)
        return [(name, self._tick(self.kept[name], at, now)) for at, name in due]

    def _tick(self, kept: ExpectedCron, due: datetime, now: datetime) -> list[NewJob]:
        times = [due]
        while (following := _next(kept.cron, times[-1])) <= now:
            times.append(following)
        kept.due, kept.last, kept.revision = following, max(now, due), kept.revision + 1
        if kept.cron.missed is Missed.ONCE:
            times = times[:1]
        elif kept.cron.missed is Missed.SKIP:
            times = [one for one in times if now - one <= _STILL_KEPT]
        return [kept.cron.job_at(one) for one in times]


def _next(cron: Cron, moment: datetime) -> datetime:
    """Return the time after this one."""
    return moment + (_HOUR if cron.every is None else cron.every)


def _first_after(cron: Cron, moment: datetime) -> datetime:
    """Return the first time after that moment, to the millisecond."""
    whole = moment.replace(microsecond=moment.microsecond // 1000 * 1000)
    if cron.every is not None:
        return whole + cron.every
    assert cron.pattern == HOURLY
    return whole.astimezone(UTC).replace(minute=0, second=0, microsecond=0) + _HOUR


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
