"""The log of every attempt: collected in memory, written in batches, never in a delivery's way."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Final

import structlog
from sqlalchemy import insert
from sqlalchemy.exc import SQLAlchemyError

from db import Database, DeliveryAttempt

log = structlog.get_logger(__name__)

FLUSH_INTERVAL: Final = timedelta(milliseconds=500)
MAX_BUFFERED: Final = 20_000
MAX_BATCH: Final = 1_000


class AttemptLog:
    """Writes `delivery_attempts` at most a second late, and on `close` what is left.

    While the database refuses them, 20 000 attempts are kept; beyond that the oldest are dropped, which is logged.
    A crash loses what was not written yet: the log describes deliveries, it does not decide any.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._buffer: list[dict[str, object]] = []
        self._flusher: asyncio.Task[None] | None = None

    def add(self, attempt: DeliveryAttempt) -> None:
        """The attempt will be written soon."""
        self._buffer.append(attempt.model_dump(exclude={"id"}))
        if len(self._buffer) > MAX_BUFFERED:
            log.warning("attempt_log_overflow", dropped=MAX_BATCH)
            del self._buffer[:MAX_BATCH]
        if self._flusher is None:
            self._flusher = asyncio.create_task(self._flush_soon(), name="attempt-log")

    async def close(self) -> None:
        """Everything added is written, as far as the database takes it."""
        if self._flusher is not None:
            self._flusher.cancel()
            await asyncio.gather(self._flusher, return_exceptions=True)
        await self._flush()

    async def _flush_soon(self) -> None:
        try:
            while self._buffer:
                await asyncio.sleep(FLUSH_INTERVAL.total_seconds())
                await self._flush()
        finally:
            self._flusher = None

    async def _flush(self) -> None:
        while self._buffer:
            batch = self._buffer[:MAX_BATCH]
            try:
                async with self._database.transaction() as session:
                    connection = await session.connection()
                    await connection.execute(insert(DeliveryAttempt), batch)
            except SQLAlchemyError as error:
                log.warning("attempt_log_not_written", waiting=len(self._buffer), error=type(error).__name__)
                return
            del self._buffer[: len(batch)]
