"""What the database tells of the whole node, in one bounded look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlmodel import col

from db import BlacklistedServer, Database, DeliveryJob, RunOutcome, SchedulerJob, Server

MAX_ROWS: Final = 20_000
"""Deliveries looked at, oldest first, by the index of those that are not over."""
JOBLESS_AFTER: Final = timedelta(minutes=2)
"""Longer than a queue's hiccup and a sweep: who has no job by then is worth a look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseNumbers:
    """Counts over all processes of the node. Deliveries are those that this application's producers owe; `successes`
    are the recurring jobs whose last run succeeded, and when.
    """

    healthy: int
    unhealthy: int
    blacklist_rules: int
    owed: int
    oldest_owed: datetime | None
    without_job: int
    successes: Mapping[str, datetime]

    def oldest_owed_seconds(self, now: datetime) -> float:
        """0 where nothing is owed."""
        return 0.0 if self.oldest_owed is None else max((now - self.oldest_owed).total_seconds(), 0.0)


async def read_numbers(database: Database) -> DatabaseNumbers:
    """The numbers as they are now.

    Raises:
        SQLAlchemyError: the database did not answer.
    """
    now = datetime.now(UTC)
    async with database.read() as session:
        health = select(col(Server.is_healthy), func.count()).group_by(col(Server.is_healthy))
        servers = {bool(healthy): int(count) for healthy, count in await session.execute(health)}
        end = col(BlacklistedServer.expires_at)
        in_force = select(func.count()).select_from(BlacklistedServer).where(or_(end.is_(None), end > now))
        rules = (await session.execute(in_force)).scalar_one()
        owed, oldest, without_job = await _owed(session, now)
        done = select(col(SchedulerJob.name), col(SchedulerJob.finished_at)).where(
            col(SchedulerJob.outcome) == RunOutcome.DONE
        )
        successes = {name: at for name, at in await session.execute(done) if at is not None}
    return DatabaseNumbers(
        healthy=servers.get(True, 0),
        unhealthy=servers.get(False, 0),
        blacklist_rules=rules,
        owed=owed,
        oldest_owed=oldest,
        without_job=without_job,
        successes=successes,
    )


async def _owed(session: AsyncSession, now: datetime) -> tuple[int, datetime | None, int]:
    oldest = (
        select(
            col(DeliveryJob.created_at),
            col(DeliveryJob.queued_at),
            col(DeliveryJob.last_attempted_at),
        )
        # The original never closed the rows of what failed: those would be the oldest for ever.
        .where(col(DeliveryJob.settled_at).is_(None), col(DeliveryJob.job_name).is_not(None))
        .order_by(col(DeliveryJob.created_at))
        .limit(MAX_ROWS)
        .subquery()
    )
    row = oldest.c
    jobless = row.queued_at.is_(None) & row.last_attempted_at.is_(None) & (row.created_at < now - JOBLESS_AFTER)
    query = select(func.count(), func.min(row.created_at), func.count().filter(jobless)).select_from(oldest)
    count, first, without_job = (await session.execute(query)).one()
    return count, first, without_job
