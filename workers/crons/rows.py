"""What recurs on a storage that keeps rows of it, which workers turn; see `ticks`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Final, TypeAlias

from workers.crons.definition import Cron, CronStatus, KeptCron
from workers.crons.ticks import first_due
from workers.errors import StorageError
from workers.jobs import CronLook, CronRow, Declared, NewJob
from workers.storage.abilities import KeepsCrons

RACES: Final = 20
"""How often a change is tried again because somebody else changed the row meanwhile."""

Change: TypeAlias = Callable[[KeptCron, datetime | None, datetime], tuple[KeptCron, datetime | None]]


class CronRows:
    """The rows of one queue. Each change is one turn of a row, from the revision that was seen."""

    def __init__(self, storage: KeepsCrons) -> None:
        self._storage = storage

    def refuse(self, cron: Cron) -> None:
        """Accept any definition."""

    async def declare(self, cron: Cron) -> Declared:
        """See `crons.book.store`."""
        for _ in range(RACES):
            look = await self._storage.crons()
            row = _row(look, cron.name)
            if row is None:
                row = CronRow(name=cron.name, revision=0, due=None, body="")
                due, changed = first_due(cron, look.now), KeptCron(cron=cron)
            else:
                kept = KeptCron.decoded(cron.name, row.body)
                if kept.cron.version >= cron.version:
                    return _difference(kept, cron)
                due, changed = _due(row, kept, cron, look.now), kept.replaced(cron)
            if await self._storage.turn_cron(_next(row, changed, due)):
                return Declared.STORED
        raise _raced(cron.name)

    async def pause(self, name: str) -> bool:
        """See `Crons.pause`."""
        return await self._change(name, lambda kept, due, now: (replace(kept, paused=True), None))

    async def resume(self, name: str) -> bool:
        """See `Crons.resume`."""

        def resumed(kept: KeptCron, due: datetime | None, now: datetime) -> tuple[KeptCron, datetime | None]:
            if not kept.paused and due is not None and due <= now:
                return kept, due
            return replace(kept, paused=False), first_due(kept.cron, now)

        return await self._change(name, resumed)

    async def remove(self, name: str) -> bool:
        """See `Crons.remove`."""
        return await self._change(name, lambda kept, due, now: (replace(kept, removed=True, paused=False), None))

    async def job_now(self, name: str, suffix: str) -> NewJob | None:
        """Return a job of it whose id ends with this; None if there is none of that name."""
        found = next((one.cron for one in await self.all() if one.cron.name == name), None)
        return None if found is None else found.job_called(suffix)

    async def all(self) -> list[CronStatus]:
        """See `Crons.list`."""
        look = await self._storage.crons()
        found = [(row, KeptCron.decoded(row.name, row.body)) for row in look.rows]
        return [
            CronStatus(cron=kept.cron, due=row.due, paused=kept.paused, last=kept.last)
            for row, kept in found
            if not kept.removed
        ]

    async def _change(self, name: str, change: Change) -> bool:
        for _ in range(RACES):
            look = await self._storage.crons()
            row = _row(look, name)
            kept = None if row is None else KeptCron.decoded(name, row.body)
            if row is None or kept is None or kept.removed:
                return False
            changed, due = change(kept, row.due, look.now)
            if await self._storage.turn_cron(_next(row, changed, due)):
                return True
        raise _raced(name)


def _due(row: CronRow, kept: KeptCron, cron: Cron, now: datetime) -> datetime | None:
    """Return when a newer definition is due first: if it recurs as before, as before."""
    if kept.paused:
        return None
    if cron.recurs_as(kept.cron) and not kept.removed:
        return row.due
    # A time that had its turn has no second one, not even if the clock stepped back since.
    return first_due(cron, now if kept.last is None else max(now, kept.last))


def _difference(kept: KeptCron, cron: Cron) -> Declared:
    """Tell what becomes of a definition that is not newer than the one kept."""
    if kept.removed:
        return Declared.REMOVED
    differs = kept.cron.version == cron.version and kept.cron != cron
    return Declared.DIFFERENT if differs else Declared.KEPT


def _row(look: CronLook, name: str) -> CronRow | None:
    return next((row for row in look.rows if row.name == name), None)


def _next(row: CronRow, kept: KeptCron, due: datetime | None) -> CronRow:
    return CronRow(name=row.name, revision=row.revision + 1, due=due, body=kept.encoded())


def _raced(name: str) -> StorageError:
    return StorageError(f"cron {name!r} was changed {RACES} times by others meanwhile; try again")
