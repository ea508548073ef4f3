"""What recurs in one queue, as `Queue.crons`: rows that workers replace (see `ticks`), or what a storage repeats."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import replace
from datetime import datetime
from typing import Final, TypeAlias

from workers.checks import new_id
from workers.crons.definition import Cron, CronStatus, KeptCron
from workers.crons.ticks import first_due
from workers.errors import StorageError, Unsupported
from workers.jobs import CronLook, CronRow, Declared, NewJob
from workers.storage.abilities import KeepsCrons, RepeatsJobs
from workers.storage.base import ANY_NAME, Storage

_LOG = logging.getLogger(__name__)


class Crons:
    """What recurs in one queue. Workers of the queue store what was added here when they start.

    What is stored ticks by any worker of the queue, also by one whose process declared nothing. It recurs until it
    is removed: to delete its declaration is not enough.
    """

    def __init__(self, storage: Storage, connect: Callable[[], Awaitable[None]]) -> None:
        self._storage = storage
        self._connect = connect
        self._declared: dict[str, Cron] = {}

    @property
    def declared(self) -> Collection[Cron]:
        """What was added in this process."""
        return self._declared.values()

    def add(self, cron: Cron) -> None:
        """Declare what recurs; `declare`, or the start of a worker of this queue, stores it.

        Raises:
            Unsupported: the storage keeps nothing that recurs, or not in this way.
            ValueError: this process declared another definition of that name; a pattern of fewer than five fields.
        """
        cron.check_as_ours()
        kept(self._storage).refuse(cron)
        if self._declared.setdefault(cron.name, cron) != cron:
            raise ValueError(f"cron {cron.name!r} is declared already, with another definition")

    def check_names(self, served: Collection[str]) -> None:
        """Check that the handlers take the jobs of all that was added.

        Raises:
            ValueError: one of them has a job of another name.
        """
        for cron in self._declared.values():
            if cron.job not in served and ANY_NAME not in served:
                raise ValueError(f"cron {cron.name!r} is for jobs named {cron.job!r}, for which there is no handler")

    async def declare(self) -> None:
        """Store what was added here, unless what is stored is as new; see `store`."""
        if self._declared:
            await self._connect()
            await store(self._storage, self._declared.values())

    async def pause(self, name: str) -> bool:
        """Let it enqueue nothing until `resume`; False if there is none of that name.

        Raises:
            Unsupported: see `capabilities.cron_rows`; so for `resume`.
        """
        return await (await self._kept()).pause(name)

    async def resume(self, name: str) -> bool:
        """Let it go on, with its first time from now; what it missed meanwhile is not made up for.

        This also cures what a clock, gone far ahead and put right again, has left due in the distant future.
        """
        return await (await self._kept()).resume(name)

    async def remove(self, name: str) -> bool:
        """Let it never recur again; False if there is none of that name.

        Its version is remembered, so that a process which still declares it does not bring it back. A higher version
        does.
        """
        return await (await self._kept()).remove(name)

    async def run_now(self, name: str) -> str | None:
        """Enqueue one job of it, paused or not, and return the job's id; None if there is none of that name.

        When it recurs stays as it was.
        """
        job = await (await self._kept()).job_now(name, f"now:{new_id()}")
        if job is None:
            return None
        await self._storage.enqueue([job])
        return job.id

    async def _kept(self) -> CronRows | CronSchedulers:
        await self._connect()
        return kept(self._storage)

    # Last, because from here on `list` is this method and no longer the type.
    async def list(self) -> list[CronStatus]:
        """Return all that is stored and not removed, by name.

        Raises:
            StorageError: a newer version wrote one of them.
        """
        return await (await self._kept()).all()


def kept(storage: Storage) -> CronRows | CronSchedulers:
    """Return what recurs in the storage's queue, in the way in which the storage keeps it.

    Raises:
        Unsupported: it keeps nothing that recurs.
    """
    if storage.capabilities.crons and isinstance(storage, KeepsCrons):
        return CronRows(storage)
    if storage.capabilities.crons and isinstance(storage, RepeatsJobs):
        return CronSchedulers(storage)
    raise Unsupported(f"{type(storage).__name__} keeps nothing that recurs; enqueue by a scheduler of your own")


async def store(storage: Storage, crons: Iterable[Cron]) -> None:
    """Store these definitions. Of two versions the higher one counts, whoever stores first.

    A definition that differs from the stored one of the same version changes nothing, and an error is logged.
    """
    for cron in crons:
        _tell(cron, await kept(storage).declare(cron))


def _tell(cron: Cron, declared: Declared) -> None:
    if declared is Declared.REMOVED:
        _LOG.warning(
            "cron %r was removed and does not recur, although it is declared; raise its version to bring it back",
            cron.name,
        )
    elif declared is Declared.DIFFERENT:
        _LOG.error(
            "cron %r is stored with another definition of version %d, which stays; raise its version to replace it",
            cron.name,
            cron.version,
        )
    elif declared is Declared.FOREIGN:
        _LOG.error(
            "cron %r is stored by another program, and stays as that made it; give yours another name, or remove that"
            " one first",
            cron.name,
        )


RACES: Final = 20
"""How often a change is tried again because somebody else changed the row meanwhile."""

Change: TypeAlias = Callable[[KeptCron, datetime | None, datetime], tuple[KeptCron, datetime | None]]


class CronRows:
    """The rows of one queue. Each change replaces a row, from the revision that was seen."""

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
            if await self._storage.replace_cron(_next(row, changed, due)):
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
            if await self._storage.replace_cron(_next(row, changed, due)):
                return True
        raise _raced(name)


def _due(row: CronRow, kept: KeptCron, cron: Cron, now: datetime) -> datetime | None:
    """Return when a newer definition is due first: if it recurs as before, as before."""
    if kept.paused:
        return None
    if cron.recurs_as(kept.cron) and not kept.removed:
        return row.due
    # A time that has ticked does not tick again, not even if the clock stepped back since.
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


class CronSchedulers:
    """What recurs in one queue."""

    def __init__(self, storage: RepeatsJobs) -> None:
        self._storage = storage

    def refuse(self, cron: Cron) -> None:
        """Accept what the storage can keep.

        Raises:
            Unsupported: it cannot.
        """
        self._storage.refuse_cron(cron)

    async def declare(self, cron: Cron) -> Declared:
        """See `RepeatsJobs.declare_cron`."""
        return await self._storage.declare_cron(cron)

    async def pause(self, name: str) -> bool:
        """Refuse it: the storage has no word for it."""
        raise Unsupported(f"{self._storage!r} cannot pause what recurs: pause the queue, or remove {name!r}")

    async def resume(self, name: str) -> bool:
        """Refuse it: nothing can be paused."""
        raise Unsupported(f"{self._storage!r} cannot pause what recurs, so {name!r} cannot be resumed")

    async def remove(self, name: str) -> bool:
        """See `RepeatsJobs.remove_cron`."""
        return await self._storage.remove_cron(name)

    async def job_now(self, name: str, suffix: str) -> NewJob | None:
        """See `RepeatsJobs.cron_job`."""
        return await self._storage.cron_job(name, suffix)

    async def all(self) -> list[CronStatus]:
        """See `Crons.list`."""
        return [CronStatus(cron=one.cron, due=one.due) for one in await self._storage.scheduled()]
