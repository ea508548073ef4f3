"""The delivery queues, whose jobs name their origin: the id of the database with their row, and this node's URL.

Without that, two databases on one queue, by a wrong setting or a copied `.env`, would end each other's jobs: the row is
not there, so the delivery looks as if it were over. The URL tells a copy of the database from its original. A key could
not serve for this, as keys are rotated. Jobs of other nodes go back until somebody mends the setting.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeAlias, TypeVar

from sqlalchemy import ColumnElement, Connection, select, true
from sqlalchemy.orm import Session
from sqlmodel import col

from db import Database, DatabaseIdentity, DeliveryJob, DeliveryPayload, among
from federation.base.queues.job_data import FederationDeliveryJob
from federation.base.queues.queue import JobQueue
from federation.delivery.errors import NotNow
from federation.delivery.sightings import Sightings
from workers import Job
from workers.clock import Clock, SystemClock
from workers.specs import Enqueued
from workers.storage.base import Storage

T = TypeVar("T")

_IDENTITY: Final = select(col(DatabaseIdentity.id))


@dataclass(frozen=True, slots=True)
class JobOrigin:
    """The node and the database that a job belongs to. None means unknown, as with jobs of Node's producers."""

    node: str | None
    database: str | None

    def __str__(self) -> str:
        return f"{self.node or 'a node without a URL'}, database {self.database or 'not known'}"

    def has(self, other: JobOrigin) -> bool:
        """Tell whether a job of `other` belongs to this origin, as far as the job says."""
        return other.node in (None, self.node) and other.database in (None, self.database)


class OwnJobOrigin:
    """The origin of this process's jobs. The database's id is read once."""

    def __init__(self, database: Database, own_url: str | None) -> None:
        self._database = database
        self._own_url = own_url
        self._origin: JobOrigin | None = None

    async def get(self) -> JobOrigin:
        """Return the origin that our jobs carry.

        Raises:
            SQLAlchemyError: the database did not answer, or has not been upgraded.
        """
        if self._origin is None:
            self._set([row.id for row in await self._database.rows(_IDENTITY)])
        assert self._origin is not None
        return self._origin

    def on(self, connection: Connection) -> JobOrigin:
        """Return the same, for synchronous code that has a connection to the database."""
        if self._origin is None:
            self._set(list(connection.execute(_IDENTITY).scalars()))
        assert self._origin is not None
        return self._origin

    def _set(self, found: list[str]) -> None:
        self._origin = JobOrigin(node=self._own_url, database=found[0] if found else None)


def origin_of(job: FederationDeliveryJob) -> JobOrigin:
    return JobOrigin(node=job.node, database=job.database)


Added: TypeAlias = tuple[str, object, Mapping[str, object] | None]
"""A job as `JobQueue.add_bulk` takes it."""

_OWN_TEXTS: Final = select(col(DeliveryJob.id), col(DeliveryJob.payload)).where(
    among(col(DeliveryJob.id), "ids"), col(DeliveryJob.payload_id).is_(None)
)
_SHARED_TEXTS: Final = select(col(DeliveryPayload.id), col(DeliveryPayload.payload)).where(
    among(col(DeliveryPayload.id), "ids")
)


class DeliveryQueue(JobQueue):
    """A `JobQueue` whose jobs that name a row's text carry `origin`, and with `inline` that text instead of its id.

    A job in the caller's transaction always has the id: where that is possible, only our workers share the queue.
    """

    def __init__(
        self, storage: Storage, *, database: Database, origin: OwnJobOrigin, inline: bool = False, **options: Any
    ) -> None:
        super().__init__(storage, **options)
        self._database = database
        self._origin = origin
        self._inline = inline

    async def add_bulk(self, jobs: Sequence[Added], *, connection: object | None = None) -> list[Enqueued]:
        """Add the jobs as `JobQueue.add_bulk` does.

        Raises:
            SQLAlchemyError: the database did not answer; nothing was added.
        """
        jobs = list(_stamped(jobs, await self._origin.get()))
        if self._inline and connection is None:
            jobs = await self._with_texts(jobs)
        return await super().add_bulk(jobs, connection=connection)

    def add_bulk_on(self, connection: object, jobs: Sequence[Added]) -> list[Enqueued]:
        """Add the jobs as `JobQueue.add_bulk_on` does; `connection` is a session on the database."""
        if not isinstance(connection, Session):
            raise TypeError(f"jobs of deliveries are added in a Session, not in {type(connection).__name__}")
        return super().add_bulk_on(connection, list(_stamped(jobs, self._origin.on(connection.connection()))))

    async def _with_texts(self, jobs: Sequence[Added]) -> list[Added]:
        """Put the texts into the jobs. Jobs whose row is gone keep the id: there is nothing to send."""
        wanted = {str(data["payloadId"]) for _, data, _ in jobs if isinstance(data, Mapping) and data.get("payloadId")}
        if not wanted:
            return list(jobs)
        values = {"ids": sorted(wanted)}
        rows = [*await self._database.rows(_OWN_TEXTS, values), *await self._database.rows(_SHARED_TEXTS, values)]
        texts: dict[str, str] = {row[0]: row[1] for row in rows if row[1]}
        return [(name, _inlined(data, texts) if isinstance(data, Mapping) else data, opts) for name, data, opts in jobs]


def _inlined(data: Mapping[str, object], texts: Mapping[str, str]) -> Mapping[str, object]:
    text = texts.get(str(data.get("payloadId")))
    if text is None:
        return data
    return {**{name: value for name, value in data.items() if name != "payloadId"}, "payload": text}


def _stamped(jobs: Iterable[Added], origin: JobOrigin) -> Iterable[Added]:
    stamp = {name: value for name, value in (("node", origin.node), ("database", origin.database)) if value}
    for name, data, opts in jobs:
        yield (name, {**stamp, **data} if isinstance(data, Mapping) and data.get("payloadId") else data, opts)


_NONE_OF_THEIR_OWN: Final[Mapping[str, JobQueue]] = {}


class DeliveryQueues:
    """The queues of a node's deliveries: each job lies in that of its wire, which its name says.

    Jobs of the names in `own` lie in queues of their own, and all others in `main`, where workers of other programs may
    take them. Nobody works on the queue of a name that is `off`: it is used once a delivery of that name is owed.
    """

    def __init__(
        self, main: JobQueue, own: Mapping[str, JobQueue] = _NONE_OF_THEIR_OWN, *, off: Collection[str] = ()
    ) -> None:
        self.main: Final = main
        self._own: Final = dict(own)
        self.all: Final = tuple(dict.fromkeys((main, *(queue for name, queue in own.items() if name not in off))))
        """Those that are worked on, `main` first."""

    def of(self, job_name: str | None) -> JobQueue:
        """Return the queue in which jobs of this name lie."""
        return self.main if job_name is None else self._own.get(job_name, self.main)

    def split(self, items: Iterable[T], name: Callable[[T], str]) -> Mapping[JobQueue, list[T]]:
        """Return the items by the queue of each, in their order; `name` tells the name of an item's job."""
        found: dict[JobQueue, list[T]] = {}
        for item in items:
            found.setdefault(self.of(name(item)), []).append(item)
        return found

    def lie_in(self, queue: JobQueue) -> ColumnElement[bool]:
        """Return the condition on rows whose jobs lie in that queue."""
        names = [name for name, own in self._own.items() if own is queue]
        if names:
            return col(DeliveryJob.job_name).in_(names)
        return col(DeliveryJob.job_name).not_in(list(self._own)) if self._own else true()

    async def start(self) -> None:
        """Open all that are worked on; see `Queue.start`."""
        for queue in self.all:
            await queue.start()

    async def stop(self) -> None:
        """Close all of them."""
        for queue in dict.fromkeys((self.main, *self._own.values())):
            await queue.stop()

    def check_loop(self) -> None:
        """See `Queue.check_loop`."""
        for queue in self.all:
            queue.check_loop()

    async def add_bulk(self, jobs: Sequence[Added]) -> list[Enqueued]:
        """Add each job to its queue, as `JobQueue.add_bulk` does; the results are in the order of the jobs.

        What one queue does not accept leaves out the jobs of those after it.
        """
        found: dict[int, Enqueued] = {}
        for queue, chosen in self._numbered(jobs):
            found |= zip(chosen, await queue.add_bulk(list(chosen.values())), strict=True)
        return [found[number] for number in range(len(jobs))]

    def add_bulk_on(self, connection: object, jobs: Sequence[Added]) -> list[Enqueued]:
        """Add each job to its queue, as `JobQueue.add_bulk_on` does; the results are in the order of the jobs."""
        found: dict[int, Enqueued] = {}
        for queue, chosen in self._numbered(jobs):
            found |= zip(chosen, queue.add_bulk_on(connection, list(chosen.values())), strict=True)
        return [found[number] for number in range(len(jobs))]

    async def remove(self, ids: Sequence[str]) -> None:
        """Remove the jobs with these ids, in whichever queue they are, unless a worker is running them."""
        for queue in self.all:
            await queue.storage.remove(ids)

    def _numbered(self, jobs: Sequence[Added]) -> Iterable[tuple[JobQueue, dict[int, Added]]]:
        for queue, numbered in self.split(enumerate(jobs), lambda each: each[1][0]).items():
            yield queue, dict(numbered)


FIRST_PAUSE: Final = timedelta(minutes=1)
LONGEST_PAUSE: Final = timedelta(hours=1)


class OtherNodesJobs:
    """Tells jobs of other nodes from ours, as far as jobs name their node, and notes each of them in `sightings`."""

    def __init__(self, origin: OwnJobOrigin, sightings: Sightings, clock: Clock | None = None) -> None:
        self._origin = origin
        self._sightings = sightings
        self._clock = clock or SystemClock()

    async def give_back(self, job: Job, delivery: FederationDeliveryJob) -> None:
        """Give the job back if it is another node's; do nothing with a job of ours.

        The row of another node's job is not in our database, so nobody here can decide about it.

        Raises:
            NotNow: the job is another node's.
            SQLAlchemyError: as `OwnJobOrigin.get`.
        """
        ours, theirs = await self._origin.get(), origin_of(delivery)
        if ours.has(theirs):
            return
        pause = pause_for(self._clock.now() - job.created_at)
        self._sightings.stranger(str(theirs), str(ours), delivery_id=delivery.delivery_job_id, pause=pause)
        raise NotNow(f"the job is of {theirs}, and this is {ours}", pause)


def pause_for(age: timedelta) -> timedelta:
    """Return how long a foreign job of that age is left alone: 1, 2, 4 … 60 min, as each pause doubles its age."""
    return min(max(age, timedelta(0)) + FIRST_PAUSE, LONGEST_PAUSE)
