"""What has to be done now and then: removing what has been kept long enough."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

import structlog
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from sqlalchemy import ColumnElement, delete, null, select
from sqlalchemy.exc import SQLAlchemyError
from sqlmodel import col

from db import Database, DeliveryAttempt, DeliveryJob
from federation.delivery.payloads import release

log = structlog.get_logger(__name__)

KEEP_SETTLED_ROWS: Final = timedelta(days=7)
KEEP_ATTEMPTS: Final = timedelta(days=30)
INTERVAL: Final = timedelta(hours=1)
BATCH: Final = 5_000


class Housekeeping:
    """Purges settled deliveries after 7 days and attempts after 30, once an hour and a minute after the start.

    Every process may run it: a purge finds what is there to delete, in batches, and repeating it does nothing.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._scheduler = AsyncIOScheduler(timezone=UTC)

    def start(self) -> None:
        """The purge runs in this event loop until `stop`. Idempotent."""
        if self._scheduler.running:
            return
        self._scheduler.add_job(
            self.purge,
            "interval",
            seconds=INTERVAL.total_seconds(),
            next_run_time=datetime.now(UTC) + timedelta(minutes=1),
            jitter=300,
            coalesce=True,
            max_instances=1,
        )
        self._scheduler.start()

    def stop(self) -> None:
        """No further purge begins."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)

    async def purge(self) -> int:
        """Everything past its time is gone; how many rows. A database that fails is logged and tried next time."""
        now = datetime.now(UTC)
        try:
            rows = await self._delete(DeliveryJob, col(DeliveryJob.settled_at) < now - KEEP_SETTLED_ROWS)
            attempts = await self._delete(DeliveryAttempt, col(DeliveryAttempt.started_at) < now - KEEP_ATTEMPTS)
        except SQLAlchemyError as error:
            log.warning("purge_failed", error=type(error).__name__)
            return 0
        if rows or attempts:
            log.info("purged", delivery_rows=rows, attempts=attempts)
        return rows + attempts

    async def _delete(self, model: type[DeliveryJob] | type[DeliveryAttempt], expired: ColumnElement[bool]) -> int:
        """In batches: one transaction must not hold SQLite's write lock for long."""
        total = 0
        text = col(DeliveryJob.payload_id) if model is DeliveryJob else null()
        while True:
            batch = select(col(model.id)).where(expired).limit(BATCH)
            async with self._database.transaction() as session:
                gone = (await session.execute(delete(model).where(col(model.id).in_(batch)).returning(text))).scalars()
                texts = gone.all()
                await release(session, texts)
            count = len(texts)
            total += count
            if count < BATCH:
                return total
