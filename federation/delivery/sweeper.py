"""Deliveries that are owed and whose job was never added: a process died, or the queue was down, after the commit.

Theory of operation. Such a row was written by `Outbox` (it has a `job_name`, which rows of Node producers have not), is
open, was never attempted, and has no job of its id in the queue, in whatever state. A sweep reads the rows that are old
enough for their job to have been added, asks the queue for their jobs, and adds those that are missing under the row's
id, so whoever adds them at the same time adds nothing twice. `queued_at` notes when a job was last known to be there:
rows that wait behind a long backlog are asked about every ten minutes, in case the queue lost its data, and not by
every sweep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Final

import structlog
from sqlalchemy import or_, select, update
from sqlmodel import col

from db import Database, DeliveryJob
from federation.base.bull_queue import BullQueue
from federation.delivery.outbox import PlannedJob, delivery_job

log = structlog.get_logger(__name__)

MIN_AGE: Final = timedelta(seconds=30)
PAGE: Final = 1_000
MAX_ROWS: Final = 20_000
"""Looked at by one sweep."""
ASK_AGAIN: Final = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwedRow:
    """What a row says of the job it should have."""

    id: str
    job_name: str
    target_url: str
    server_url: str
    payload_id: str | None

    def job(self) -> PlannedJob:
        return delivery_job(
            self.job_name,
            self.id,
            target_url=self.target_url,
            server_url=self.server_url,
            payload_id=self.payload_id,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What one sweep saw and did; `complete` if no row was left to look at."""

    rows: int
    added: int
    complete: bool


class OutboxSweeper:
    """Adds the jobs of deliveries that are owed and have none. One process at a time should; several do no harm."""

    def __init__(self, database: Database, queue: BullQueue, *, min_age: timedelta = MIN_AGE) -> None:
        self._database = database
        self._queue = queue
        self._min_age = min_age

    async def sweep(self) -> Swept:
        """Every delivery that is owed has its job, up to 20 000 of them in one sweep.

        Raises:
            SQLAlchemyError, WorkersError: the database or the queue did not answer; the next sweep looks again.
        """
        await self._queue.start()
        now = datetime.now(UTC)
        rows = added = 0
        complete = False
        while rows < MAX_ROWS and not complete:
            page = await self._page(now)
            if page:
                added += await self._add_missing(page)
                await self._note_queued(page, now)
            rows += len(page)
            complete = len(page) < PAGE
        if added:
            log.warning("outbox_jobs_added", count=added, rows=rows)
        return Swept(rows=rows, added=added, complete=complete)

    async def _page(self, now: datetime) -> Sequence[OwedRow]:
        query = (
            select(*(getattr(DeliveryJob, column.name) for column in fields(OwedRow)))
            .where(
                col(DeliveryJob.job_name).is_not(None),
                col(DeliveryJob.settled_at).is_(None),
                col(DeliveryJob.last_attempted_at).is_(None),
                col(DeliveryJob.created_at) < now - self._min_age,
                or_(col(DeliveryJob.queued_at).is_(None), col(DeliveryJob.queued_at) < now - ASK_AGAIN),
            )
            .order_by(col(DeliveryJob.created_at))
            .limit(PAGE)
        )
        async with self._database.read() as session:
            return [OwedRow(**row._mapping) for row in await session.execute(query)]

    async def _add_missing(self, rows: Sequence[OwedRow]) -> int:
        jobs = await self._queue.storage.status([row.id for row in rows])
        missing = [row.job() for row, job in zip(rows, jobs, strict=True) if job is None]
        if missing:
            await self._queue.add_bulk(missing)
        return len(missing)

    async def _note_queued(self, rows: Sequence[OwedRow], now: datetime) -> None:
        async with self._database.transaction() as session:
            await session.execute(
                update(DeliveryJob).where(col(DeliveryJob.id).in_([row.id for row in rows])).values(queued_at=now)
            )
