"""What an operator does to a queue: `Queue.manage`, apart from the verbs of applications, so that none drains it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from datetime import timedelta
from itertools import islice
from typing import Final

from workers.jobs import JobState, JobStatus, Page, Repaired, SetAside, WorkerInfo
from workers.storage.base import Repairable, Storage

BATCH: Final = 1_000


class Management:
    """The operator's verbs on one queue. Each is one atomic step per job; a job that does not fit is left as it is."""

    def __init__(self, storage: Storage, connect: Callable[[], Awaitable[None]]) -> None:
        self._storage = storage
        self._connect = connect

    async def pause(self) -> None:
        """No worker, in whichever process, claims a job of this queue until `resume`; running jobs go on."""
        await self._connect()
        await self._storage.pause()

    async def resume(self) -> None:
        """Jobs are claimed again."""
        await self._connect()
        await self._storage.resume()

    async def is_paused(self) -> bool:
        """Whether the queue waits for `resume`."""
        await self._connect()
        return await self._storage.is_paused()

    async def retry(self, ids: Iterable[str]) -> int:
        """Failed jobs among `ids` are queued again with fresh attempts; how many."""
        ids = _several(ids)
        await self._connect()
        return await self._storage.retry(ids)

    async def retry_where(self, matches: Callable[[JobStatus], bool]) -> int:
        """Failed jobs of which `matches` is true are queued again with fresh attempts; how many.

        Those that fail meanwhile may be missed.
        """
        # All are looked at before the first moves: pages of a list that shrinks would skip some.
        found = iter([status.id for status in await self._failed() if matches(status)])
        retried = 0
        while batch := list(islice(found, BATCH)):
            retried += await self._storage.retry(batch)
        return retried

    async def remove(self, ids: Iterable[str]) -> int:
        """Jobs among `ids` are gone without a trace, but for those that are running; how many."""
        ids = _several(ids)
        await self._connect()
        return await self._storage.remove(ids)

    async def promote(self, ids: Iterable[str]) -> int:
        """Scheduled and failing jobs among `ids` are due now; how many."""
        ids = _several(ids)
        await self._connect()
        return await self._storage.promote(ids)

    async def drain(self) -> int:
        """Every job that waits, for whatever, is gone; running and finished ones stay. How many."""
        await self._connect()
        return await self._storage.drain()

    async def clean(self, state: JobState, *, older_than: timedelta, limit: int = BATCH) -> int:
        """Up to `limit` completed or failed records that ended longer ago than `older_than` are gone; how many.

        Raises:
            ValueError: a state that no job ends in.
        """
        await self._connect()
        return await self._storage.clean(state, older_than=older_than, limit=limit)

    async def workers(self) -> list[WorkerInfo]:
        """The workers seen lately, in all processes."""
        await self._connect()
        return await self._storage.workers()

    @property
    def sets_aside(self) -> bool:
        """Whether the storage sets aside what no worker can run; another one fails such jobs, with a reason."""
        return isinstance(self._storage, Repairable)

    async def quarantine(self) -> list[SetAside]:
        """What no worker can run, and nobody will until `repair`; the oldest first."""
        await self._connect()
        return await self._storage.quarantine() if isinstance(self._storage, Repairable) else []

    async def repair(self, *, drop: bool = False) -> list[Repaired]:
        """Jobs in quarantine are queued again, as new ones; keys in the way of the queue are set aside.

        What is no job, or has the id of one that is there, stays in quarantine, or goes with `drop`. Returns what came
        of each.
        """
        await self._connect()
        return await self._storage.repair(drop=drop) if isinstance(self._storage, Repairable) else []

    async def _failed(self) -> list[JobStatus]:
        page = await self.list(JobState.FAILED, limit=BATCH)
        found = [*page.jobs]
        while page.cursor is not None:
            page = await self.list(JobState.FAILED, cursor=page.cursor, limit=BATCH)
            found += page.jobs
        return found

    # Last, because from here on `list` is this method and no longer the type.
    async def list(self, state: JobState, *, cursor: str | None = None, limit: int = 100) -> Page:
        """One page of the jobs in a state, in no promised order; a job that moves meanwhile may be missed."""
        await self._connect()
        return await self._storage.list(state, cursor=cursor, limit=limit)


def _several(ids: Iterable[str]) -> tuple[str, ...]:
    """The ids, and not the letters of one.

    Raises:
        TypeError: it is one text.
    """
    if isinstance(ids, str):
        raise TypeError(f"ids are several texts, as [{ids!r}], not one")
    return tuple(ids)
