"""The delivery queue, whose jobs name their origin: the id of the database with their row, and this node's URL.

Without that, two databases on one queue, by a wrong setting or a copied `.env`, would end each other's jobs: the row is
not there, so the delivery looks as if it were over. The URL tells a copy of the database from its original. A key could
not serve for this, as keys are rotated. Jobs of other nodes go back until somebody mends the setting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeAlias

from sqlalchemy import Connection, select
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
