"""The log of attempts.

Attempts at deliveries with a row are written by the ledger, together with the row's fate; those of jobs without a row
are collected in memory and written in batches, so that no delivery waits for the log.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import cache
from typing import Any, Final

import structlog
from sqlalchemy import Connection, Executable, Row, insert
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError

from db import AttemptNote, AttemptOutcome, Database, DeliveryAttempt
from federation.base.meter import NO_METER, Meter
from federation.delivery.error_codes import BLACKLISTED, STALLED
from federation.protocol.values import Value

log = structlog.get_logger(__name__)

FLUSH_INTERVAL: Final = timedelta(milliseconds=500)
MAX_BUFFERED: Final = 20_000
MAX_BATCH: Final = 1_000


class AttemptRecord(Value, frozen=True, kw_only=True):
    """A future row of `delivery_attempts`: a plain value, which costs far less than the model."""

    delivery_id: str
    job_name: str
    method: str | None
    server_url: str
    attempt: int
    started_at: datetime
    duration_ms: int
    outcome: AttemptOutcome
    error_code: str | None = None
    http_status: int | None = None
    relayed_by: str | None = None
    request_bytes: int | None = None
    response_bytes: int | None = None
    series: int | None = None
    remote_code: str | None = None
    note: AttemptNote | None = None
    activity_id: str | None = None


_TABLE: Final = DeliveryAttempt.__table__  # type: ignore[attr-defined] # SQLModel adds it at run time; Core skips the ORM
_INSERT: Final = insert(_TABLE)
_COLUMNS: Final = AttemptRecord.__struct_fields__
LEARNED_LATE: Final = (
    *("method", "duration_ms", "outcome", "error_code", "http_status", "remote_code", "relayed_by"),
    *("request_bytes", "response_bytes", "note", "activity_id"),
)

ATTEMPT_UNDER_WAY: Final = ("id", "series", "job_name", "server_url", "sending", "last_attempted_at")
"""What `stalled_attempt` needs of a delivery's row."""


def stalled_attempt(row: Row[*tuple[Any, ...]], *, note: AttemptNote | None = None) -> AttemptRecord:
    """Return the attempt that was under way when its worker disappeared, as far as its delivery's row tells of it."""
    return AttemptRecord(
        delivery_id=row.id,
        series=row.series,
        job_name=row.job_name or "",
        method=None,
        server_url=row.server_url or "",
        attempt=row.sending,
        started_at=row.last_attempted_at,
        duration_ms=0,
        outcome=AttemptOutcome.RETRYABLE,
        error_code=STALLED,
        note=note,
    )


def write_attempts(connection: Connection, attempts: Sequence[AttemptRecord]) -> None:
    """Insert each attempt once. If one was recorded as stalled and ended after all, update it with how it ended."""
    if attempts:
        rows = [{column: getattr(attempt, column) for column in _COLUMNS} for attempt in attempts]
        connection.execute(_insert_once(connection.dialect.name), rows)


@cache
def _insert_once(dialect: str) -> Executable:
    once = postgresql.insert(_TABLE) if dialect == "postgresql" else sqlite.insert(_TABLE)
    return once.on_conflict_do_update(
        index_elements=[_TABLE.c.delivery_id, _TABLE.c.series, _TABLE.c.attempt],
        set_={name: once.excluded[name] for name in LEARNED_LATE},
        where=_TABLE.c.error_code == STALLED,
    )


class AttemptLog:
    """Writes `delivery_attempts` at most a second late, and on `close` whatever is left.

    While the database refuses them, 20 000 attempts are kept; beyond that the oldest are dropped, which is logged. A
    crash loses what was not written yet: the log describes deliveries, it decides nothing about them.
    """

    def __init__(self, database: Database, *, meter: Meter = NO_METER) -> None:
        self._database = database
        self._meter = meter
        self._buffer: list[AttemptRecord] = []
        self._flusher: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()

    def count(self, attempt: AttemptRecord) -> None:
        """Count the attempt in the metrics; its row is written together with its delivery's."""
        self._meter.attempt(attempt.outcome, attempt.error_code, relayed=attempt.relayed_by is not None)
        if attempt.note is AttemptNote.GIVEN_UP and attempt.error_code != BLACKLISTED:
            self._meter.failed()

    def count_second_knock(self, signature: str | None) -> None:
        """Count that an attempt knocked twice; `signature` is the kind that counted."""
        self._meter.second_knock(signature)

    def add(self, attempt: AttemptRecord) -> None:
        """Count the attempt, which belongs to a job without a row, and write it soon."""
        self.count(attempt)
        self._buffer.append(attempt)
        if len(self._buffer) > MAX_BUFFERED:
            log.warning("attempt_log_overflow", dropped=MAX_BATCH)
            del self._buffer[:MAX_BATCH]
        if self._flusher is None:
            self._flusher = asyncio.create_task(self._flush_soon(), name="attempt-log")

    async def close(self) -> None:
        """Write everything that was added, as far as the database accepts it. More may be added afterwards."""
        if self._flusher is None and self._buffer:
            self._flusher = asyncio.create_task(self._flush_soon(), name="attempt-log")
        self._hurry.set()
        try:
            if self._flusher is not None:
                await asyncio.wait([self._flusher])
        finally:
            self._hurry.clear()

    async def _flush_soon(self) -> None:
        try:
            while self._buffer:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(FLUSH_INTERVAL.total_seconds()):
                        await self._hurry.wait()
                if not await self._flush() and self._hurry.is_set():
                    return
        finally:
            self._flusher = None

    async def _flush(self) -> bool:
        """Write what has gathered, and return whether the database accepted it.

        What it did not accept goes back to the buffer.
        """
        while self._buffer:
            batch, self._buffer = self._buffer[:MAX_BATCH], self._buffer[MAX_BATCH:]
            try:
                await self._write(batch)
            except SQLAlchemyError as error:
                self._buffer = batch + self._buffer
                log.warning("attempt_log_not_written", waiting=len(self._buffer), error=type(error).__name__)
                return False
        return True

    async def _write(self, batch: list[AttemptRecord]) -> None:
        rows = [{column: getattr(attempt, column) for column in _COLUMNS} for attempt in batch]
        try:
            await self._database.transact(lambda connection: connection.execute(_INSERT, rows))
        except (DataError, IntegrityError, UnicodeError) as error:
            if len(batch) == 1:
                log.warning("attempt_log_refused", delivery_id=batch[0].delivery_id, error=type(error).__name__)
                return
            for attempt in batch:  # one row that the database will never accept must not block the others for ever
                await self._write([attempt])
