"""Owing a delivery: a row in the application's own transaction, and a job once that transaction is committed.

Theory of operation. `enqueue_delivery` inserts the row and notes the job. Where the queue lives in the same database,
the job is inserted in the same transaction: both or neither. Elsewhere it is added after the commit, under the row's
id, so adding it twice is harmless; a process that dies in between leaves a row without a job, recognisable by its
`job_name`, its null `last_attempted_at` and no job of that id.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypeAlias

import structlog
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from db import Database, DeliveryJob, new_id
from federation.protocol.activities import parse_method
from federation.protocol.urls import canonical_origin
from federation.queues import BullQueue, FederationDeliveryJob
from workers import WorkersError
from workers.jobs import check_text

log = structlog.get_logger(__name__)

PlannedJob: TypeAlias = tuple[str, object, dict[str, object]]


@dataclass(slots=True)
class _Pending:
    """The jobs one session's transaction will add, each with its row."""

    jobs: list[tuple[DeliveryJob, PlannedJob]] = field(default_factory=list)

    def take(self, session: Session) -> list[PlannedJob]:
        """Those whose row is part of the transaction: a savepoint rolled back takes its rows out of the session."""
        jobs, self.jobs = self.jobs, []
        return [job for row, job in jobs if row in session]


_KEY = "federation.outbox"


class Outbox:
    """Deliveries of one application database. `joins`: the queue lives in that database and takes its connection."""

    def __init__(self, database: Database, queue: BullQueue, *, joins: bool) -> None:
        self._database = database
        self._queue = queue
        self._joins = joins
        self._adding: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSession]:
        """The block's writes are committed, and every delivery it enqueued is in the queue.

        If the block raises, neither happens. Jobs the queue does not take after the commit are logged: their rows are
        committed, so they are owed, not lost.
        """
        if self._joins:  # not in the transaction: connecting for the first time writes, and would wait for its lock
            await self._queue.start()
        pending = _Pending()
        async with self._database.transaction() as session:
            session.sync_session.info[_KEY] = pending
            yield session
            jobs = pending.take(session.sync_session)
            if self._joins and jobs:
                await self._queue.add_bulk(jobs, connection=session)
        if not self._joins and jobs:
            await self._add(jobs)

    async def enqueue_delivery(
        self, session: AsyncSession, name: str, target_url: str, server_url: str, payload: str
    ) -> str:
        """A delivery of `payload` to `target_url` is owed from the moment `session` commits; returns its id.

        In a session of `transaction()` the job is certain when that block has ended; in a session of your own it
        follows the commit by itself.

        Raises:
            ValueError: the payload is no activity we deliver, a URL is not acceptable, or the target is not on that
                server.
        """
        check_text("job name", name)
        parse_method(payload)
        server_url = canonical_origin(server_url)
        if canonical_origin(target_url) != server_url:
            raise ValueError(f"the target URL is not on {server_url}, the server the delivery is for")
        if not target_url.isascii():
            raise ValueError("the target URL must have everything but ASCII percent-encoded")
        now = datetime.now(UTC)
        row = DeliveryJob(
            id=new_id(),
            target_url=target_url,
            payload=payload,
            created_at=now,
            job_name=name,
            server_url=server_url,
            queued_at=now if self._joins else None,
        )
        data = FederationDeliveryJob(
            delivery_job_id=row.id, target_url=target_url, server_url=server_url, payload=payload
        )
        session.add(row)
        await self._plan(session, row, (name, data.to_wire(), {"jobId": row.id}))
        return row.id

    async def close(self) -> None:
        """Jobs that follow a commit of somebody else's session are added."""
        await asyncio.gather(*self._adding, return_exceptions=True)

    async def _plan(self, session: AsyncSession, row: DeliveryJob, job: PlannedJob) -> None:
        pending = session.sync_session.info.get(_KEY)
        if pending is not None:
            pending.jobs.append((row, job))
        elif self._joins:
            await self._queue.add_bulk([job], connection=session)
        else:
            self._follow_commit(session.sync_session).jobs.append((row, job))

    def _follow_commit(self, session: Session) -> _Pending:
        pending: _Pending = session.info.setdefault(_KEY, _Pending())

        @event.listens_for(session, "after_commit")
        def add(_session: Session) -> None:
            if session.in_nested_transaction():  # a savepoint ended, the transaction goes on
                return
            jobs = pending.take(session)
            if jobs:
                task = asyncio.get_running_loop().create_task(self._add(jobs))
                self._adding.add(task)
                task.add_done_callback(self._adding.discard)

        return pending

    async def _add(self, jobs: list[PlannedJob]) -> None:
        try:
            await self._queue.add_bulk(jobs)
        except WorkersError as error:
            log.error(
                "outbox_jobs_not_added",
                delivery_ids=[options["jobId"] for _, _, options in jobs][:20],
                count=len(jobs),
                error=type(error).__name__,
            )
