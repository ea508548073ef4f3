"""The operator's side of a queue, as `Queue.manage`.

It is apart from what applications call, so that none drains a queue by mistake.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Final, Protocol

from workers.details import READ_AT_ONCE, JobDetails, JobReader
from workers.errors import Unsupported
from workers.jobs import EnqueueStatus, JobRef, JobState, JobStatus, Moved, Page, Repaired, SetAside, WorkerInfo
from workers.limits import HeldBack, Limit
from workers.specs import Enqueued, JobSpec
from workers.storage.abilities import KeepsLimits, KnowsDependencies, ListsInOrder, Repairable, Strandable
from workers.storage.base import Storage

BATCH: Final = 1_000


class Destination(Protocol):
    """A queue that jobs can be sent to."""

    async def enqueue_many(self, specs: Iterable[JobSpec]) -> Sequence[Enqueued]:
        """See `Queue.enqueue_many`."""

    async def get_job(self, job_id: str) -> JobDetails | None:
        """See `Queue.get_job`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttled:
    """How many queued jobs each limit keeps back, by its name, among those that were looked at."""

    by_limit: Mapping[str, int]
    looked_at: int
    is_all: bool
    """Whether these were all queued jobs."""


class Management:
    """The operator's verbs on one queue.

    Each is one atomic step per job; a job that does not qualify stays as it is.
    """

    def __init__(self, storage: Storage, connect: Callable[[], Awaitable[None]], reader: JobReader) -> None:
        self._storage = storage
        self._reader = reader
        self._connect = connect

    async def limits(self) -> dict[str, Limit]:
        """Return the limits that are stored with the queue, by name."""
        await self._connect()
        return await self._storage.declared_limits() if isinstance(self._storage, KeepsLimits) else {}

    async def remove_limit(self, name: str) -> bool:
        """Forget the limit, so that it keeps no job back any more; False if there is none of that name.

        A process that still declares it stores it again when it starts.
        """
        await self._connect()
        return isinstance(self._storage, KeepsLimits) and await self._storage.remove_limit(name)

    async def held_back(self, ids: Iterable[str]) -> Sequence[HeldBack | None]:
        """Return which limit keeps each of these jobs back; None for one that none does. See `Queue.held_back`."""
        ids = _several(ids)
        await self._connect()
        if not isinstance(self._storage, KeepsLimits):
            return [None] * len(ids)
        batches = [ids[start : start + BATCH] for start in range(0, len(ids), BATCH)]
        return [back for batch in batches for back in await self._storage.held_back(batch)]

    async def followed(self, job_id: str) -> Sequence[JobRef]:
        """Return the jobs that this one still waits for, since it was enqueued `after` them."""
        await self._connect()
        return await self._storage.followed(job_id) if isinstance(self._storage, KnowsDependencies) else ()

    async def followers(self, job_id: str, *, limit: int = BATCH) -> Sequence[JobRef]:
        """Return the jobs that wait for this one, `limit` of them at most, in no promised order."""
        await self._connect()
        return (
            await self._storage.followers(job_id, limit=limit) if isinstance(self._storage, KnowsDependencies) else ()
        )

    async def throttled(self, *, most: int = 10_000) -> Throttled:
        """Count how many queued jobs each limit keeps back, by a look at up to about `most` of them.

        Two round trips for 1 000 jobs, and none of them if there are no limits. Jobs that change meanwhile may be
        missed.
        """
        if not await self.limits():
            return Throttled(by_limit={}, looked_at=0, is_all=True)
        counted, looked_at, cursor = Counter[str](), 0, None
        while True:
            page = await self.list(JobState.QUEUED, cursor=cursor, limit=min(most, BATCH))
            counted.update(back.limit for back in await self.held_back([job.id for job in page.jobs]) if back)
            looked_at, cursor = looked_at + len(page.jobs), page.cursor
            if cursor is None or looked_at >= most:
                return Throttled(by_limit=counted, looked_at=looked_at, is_all=cursor is None)

    async def pause(self) -> None:
        """Let no worker in any process claim a job of this queue until `resume`. Running jobs go on."""
        await self._connect()
        await self._storage.pause()

    async def resume(self) -> None:
        """Let jobs be claimed again."""
        await self._connect()
        await self._storage.resume()

    async def is_paused(self) -> bool:
        """Tell whether the queue is paused."""
        await self._connect()
        return await self._storage.is_paused()

    async def retry(self, ids: Iterable[str]) -> Moved:
        """Queue the failed and cancelled jobs among `ids` again, with fresh attempts; return how many, and which.

        On Bull each has one more attempt at least, see `Capabilities.fresh_retries`.

        Raises:
            JobLockedError: on Bull, another program has the locks of some, which stay as they are.
        """
        ids = _several(ids)
        await self._connect()
        return await self._storage.retry(ids)

    async def failed(
        self, *, error: str | None = None, name: str | None = None, since: datetime | None = None
    ) -> AsyncIterator[JobDetails]:
        """Yield the failed jobs with payload, error and failed attempts, a few at a time, in no promised order.

        With `error` only those whose last error is of this type, with `name` only jobs of this name, with `since` (an
        aware time) only those that failed after it. Jobs that fail meanwhile may be missed.
        """

        def wanted(status: JobStatus) -> bool:
            kind = None if status.last_error is None else status.last_error.type
            after = since is None or (status.finished_at is not None and status.finished_at > since)
            return after and name in (None, status.name) and error in (None, kind)

        async for details in self._reader.read_all([one.id for one in await self._failed() if wanted(one)]):
            if details.status.state is JobState.FAILED:
                yield details

    async def send(self, ids: Iterable[str], to: Destination) -> Moved:
        """Enqueue the failed and cancelled jobs among `ids` in queue `to` and remove them here.

        Returns how many, and which.

        They keep id, name, payload, attempts, priority and metadata, see `JobDetails.spec`. A job is removed once the
        other queue has it: after a crash in between it is in both, and sending it again is safe, as it is there
        already. If the other queue has a job of that id with another payload, this one stays here, and is not counted.
        """
        ids = _several(ids)
        await self._connect()
        sent: list[str] = []
        for start in range(0, len(ids), READ_AT_ONCE):
            sent += await self._send(ids[start : start + READ_AT_ONCE], to)
        return Moved(sent)

    async def _send(self, ids: Sequence[str], to: Destination) -> Sequence[str]:
        dead = [
            one async for one in self._reader.read_all(ids) if _is_dead(one.status) and one.encoded_payload is not None
        ]
        answers = await to.enqueue_many([one.spec() for one in dead])
        there = [one.id for one, answer in zip(dead, answers, strict=True) if await _is_there(one, answer, to)]
        # Where `to` is this very queue, they wait to run again, and stay.
        left = [one.id for one in await self._storage.status(there) if one is not None and _is_dead(one)]
        if await self._storage.remove(left) == len(left):
            return left
        stayed = {one.id for one in await self._storage.status(left) if one is not None}
        return [job_id for job_id in left if job_id not in stayed]

    async def retry_where(self, matches: Callable[[JobStatus], bool]) -> Moved:
        """Queue every failed job for which `matches` is true again, with fresh attempts; return how many, and which.

        Jobs that fail meanwhile may be missed. Cancelled jobs are not asked about: `retry` takes their ids.
        """
        # List all of them before moving the first: the pages of a shrinking list would skip some.
        found = iter([status.id for status in await self._failed() if matches(status)])
        retried: list[str] = []
        while batch := list(islice(found, BATCH)):
            retried += (await self._storage.retry(batch)).ids
        return Moved(retried)

    async def remove(self, ids: Iterable[str]) -> int:
        """Remove the jobs among `ids` without a trace, except running ones, and return how many.

        Raises:
            JobLockedError: on Bull, another program has the locks of some, which stay as they are.
        """
        ids = _several(ids)
        await self._connect()
        return await self._storage.remove(ids)

    async def promote(self, ids: Iterable[str]) -> int:
        """Make the scheduled and failing jobs among `ids` due now, and return how many."""
        ids = _several(ids)
        await self._connect()
        return await self._storage.promote(ids)

    async def drain(self) -> int:
        """Remove every job that waits, for whatever reason, and return how many. Running and finished jobs stay."""
        await self._connect()
        return await self._storage.drain()

    async def clean(self, state: JobState, *, older_than: timedelta, limit: int = BATCH) -> int:
        """Remove up to `limit` records in a final state that ended more than `older_than` ago; return how many.

        Raises:
            ValueError: a state that no job ends in.
        """
        await self._connect()
        return await self._storage.clean(state, older_than=older_than, limit=limit)

    async def workers(self) -> list[WorkerInfo]:
        """Return the workers of all processes, also those that died not long ago: see `WorkerInfo.is_silent`."""
        await self._connect()
        return await self._storage.workers()

    @property
    def sets_aside(self) -> bool:
        """Whether the storage sets aside what no worker can run; another one fails such jobs, with a reason."""
        return isinstance(self._storage, Repairable)

    async def quarantine(self) -> list[SetAside]:
        """Return what was set aside because no worker can run it, oldest first. It stays so until `repair`."""
        await self._connect()
        return await self._storage.quarantine() if isinstance(self._storage, Repairable) else []

    async def stranded(self) -> Sequence[str]:
        """Return the ids of jobs that another program has left in no line, where no worker finds them, until `repair`.

        Only on Bull there may be any (`Strandable`).
        """
        await self._connect()
        return await self._storage.stranded() if isinstance(self._storage, Strandable) else ()

    async def repair(self, *, drop: bool = False) -> list[Repaired]:
        """Queue the jobs in quarantine again, as new ones, and set aside keys that are in the way of the queue.

        Jobs that are in no line are queued too, with the attempts they have made. Anything that is no job, or has the
        id of an existing one, stays in quarantine, or is removed with `drop`. Returns what became of each.
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
    async def list(
        self, state: JobState, *, name: str | None = None, cursor: str | None = None, limit: int = 100
    ) -> Page:
        """Return one page of the jobs in a state, oldest first where the storage has `capabilities.ordered_listing`.

        With `name` only jobs of this name. A job that changes its state meanwhile may be missed.

        Raises:
            Unsupported: a `name`, and the storage has no ordered listing.
        """
        ordered = self._storage if isinstance(self._storage, ListsInOrder) else None
        if ordered is None and name is not None:
            raise Unsupported(f"{self._storage!r} lists no jobs by name, see its `limits`; look through all pages")
        await self._connect()
        if ordered is not None:
            return await ordered.list_in_order(state, name=name, cursor=cursor, limit=limit)
        return await self._storage.list(state, cursor=cursor, limit=limit)


def _is_dead(status: JobStatus) -> bool:
    return status.state in (JobState.FAILED, JobState.CANCELLED)


async def _is_there(sent: JobDetails, answer: Enqueued, to: Destination) -> bool:
    """Tell whether the other queue has the job now, and not another one of its id."""
    if answer.status is EnqueueStatus.QUEUED:
        return True
    found = await to.get_job(sent.id)
    return found is not None and found.encoded_payload == sent.encoded_payload


def _several(ids: Iterable[str]) -> tuple[str, ...]:
    """Return the ids as a tuple; a single text is refused, for it would be taken letter by letter.

    Raises:
        TypeError: it is one text.
    """
    if isinstance(ids, str):
        raise TypeError(f"ids are several texts, as [{ids!r}], not one")
    return tuple(ids)
