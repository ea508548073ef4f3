"""Who runs a recurring job: one process at a time, by a row in the database.

Theory of operation. Every process that runs a scheduler tries to take every job at its times. Taking is one
transaction: the row is locked, nobody else's lease may be running, and the last run must have begun long enough ago. It
raises the job's token and writes who has it until when, by the database's clock. The holder renews the lease while it
runs, and stops when it learns that it has lost it: a process that was suspended past its lease finds a higher token.
The result is protected as well: how a run ended is only written under the run's own token. What a job does must be
idempotent all the same, because a suspended process notices late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import func, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlmodel import col

from db import Database, RunOutcome, SchedulerJob
from workers.clock import Clock, SystemClock

LEASE: Final = timedelta(seconds=30)
EARLY: Final = 0.9
"""The part of an interval after which a job may run again: clocks and timers of several processes jitter."""
SKEW: Final = timedelta(seconds=5)
"""Processes whose clocks differ by less still take turns."""
MAX_DETAIL_CHARACTERS: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to run a job once."""

    job: str
    token: int


class Leases:
    """Takes, renews and ends leases in the name of `holder`."""

    def __init__(
        self, database: Database, *, holder: str, duration: timedelta = LEASE, clock: Clock | None = None
    ) -> None:
        self._database = database
        self._holder = holder
        self._clock = clock or SystemClock()
        self.duration = duration

    async def take(self, job: str, *, interval: timedelta) -> Lease | None:
        """Take the job for this process.

        Return None if another process runs it, or its last run began within `interval`.
        """
        async with self._database.transaction() as session:
            row = await _locked(session, job)
            now = await self._now(session)
            # No lease ends later than one that begins now, and no run has begun yet that is to come: a clock that was
            # ahead wrote such times, and must not keep the job from running until it would have been right.
            if row.leased_until is not None and now < row.leased_until <= now + self.duration + SKEW:
                return None
            if row.started_at is not None and row.started_at - SKEW <= now < row.started_at + EARLY * interval:
                return None
            row.token += 1
            row.holder = self._holder
            row.leased_until = now + self.duration
            row.started_at = now
            return Lease(job=job, token=row.token)

    async def renew(self, lease: Lease) -> bool:
        """Renew the lease for its whole duration from now. Return False if it is somebody else's by now."""
        async with self._database.transaction() as session:
            until = await self._now(session) + self.duration
            return await _change(session, lease, {"leased_until": until})

    async def end(self, lease: Lease, outcome: RunOutcome, detail: str) -> bool:
        """Free the job, and write to its row how the run ended. Return False if it is somebody else's by now."""
        async with self._database.transaction() as session:
            values = {
                "leased_until": None,
                "finished_at": await self._now(session),
                "outcome": outcome,
                "detail": detail[:MAX_DETAIL_CHARACTERS],
            }
            return await _change(session, lease, values)

    async def _now(self, session: AsyncSession) -> datetime:
        """Return the time by the database's clock, which all processes share; with SQLite that is the machine's."""
        connection = await session.connection()
        if connection.dialect.name != "postgresql":
            return self._clock.now()
        now: datetime = (await session.execute(select(func.clock_timestamp()))).scalar_one()
        return now.astimezone(UTC)


async def last_runs(database: Database) -> Sequence[SchedulerJob]:
    """Return the rows of all jobs that have ever run, by name."""
    async with database.read() as session:
        return (await session.execute(select(SchedulerJob).order_by(col(SchedulerJob.name)))).scalars().all()


async def _locked(session: AsyncSession, job: str) -> SchedulerJob:
    query = select(SchedulerJob).where(col(SchedulerJob.name) == job).with_for_update()
    row = (await session.execute(query)).scalar_one_or_none()
    if row is None:
        with suppress(IntegrityError):  # which says that another process has just inserted it
            async with session.begin_nested():
                await session.execute(insert(SchedulerJob).values(name=job, token=0))
        row = (await session.execute(query)).scalar_one()
    return row


async def _change(session: AsyncSession, lease: Lease, values: Mapping[str, object]) -> bool:
    mine = (col(SchedulerJob.name) == lease.job, col(SchedulerJob.token) == lease.token)
    changed = update(SchedulerJob).where(*mine).values(values).returning(col(SchedulerJob.name))
    return (await session.execute(changed)).first() is not None
