"""The delivery queue. Its jobs name their origin, and carry the text where Node's workers share the queue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from sqlalchemy import select
from sqlalchemy.orm import Session
from sqlmodel import col

from db import Database, DeliveryJob, DeliveryPayload, among
from federation.base.queues.queue import JobQueue
from federation.delivery.other_nodes.origin import JobOrigin, OwnJobOrigin
from workers.specs import Enqueued
from workers.storage.base import Storage

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
