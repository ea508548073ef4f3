"""What recurs in one queue, as `Queue.crons`."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable

from workers.checks import new_id
from workers.crons.definition import Cron, CronStatus
from workers.crons.rows import CronRows
from workers.crons.schedulers import CronSchedulers
from workers.errors import Unsupported
from workers.jobs import Declared
from workers.storage.abilities import KeepsCrons, TurnsCrons
from workers.storage.base import ANY_NAME, Storage

_LOG = logging.getLogger(__name__)


class Crons:
    """What recurs in one queue. Workers of the queue store what was added here when they start.

    What is stored is turned by any worker of the queue, also by one whose process declared nothing. It recurs until it
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
            Unsupported: see `limits.cron_rows`; so for `resume`.
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
    if storage.limits.crons and isinstance(storage, KeepsCrons):
        return CronRows(storage)
    if storage.limits.crons and isinstance(storage, TurnsCrons):
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
