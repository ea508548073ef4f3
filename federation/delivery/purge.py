"""Removing what has been kept long enough."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import ColumnElement, Connection, delete, null, select
from sqlmodel import col

from db import Database, DeliveryAttempt, DeliveryJob, DeliveryPayload, FollowNews, RotateChallengeToken
from federation.delivery.payloads import release
from federation.delivery.strangers import UnusedServers
from federation.servers.blacklist import purge_expired
from workers.clock import Clock, SystemClock

KEEP_SETTLED_ROWS: Final = timedelta(days=7)
KEEP_ATTEMPTS: Final = timedelta(days=30)
KEEP_FOLLOW_NEWS: Final = timedelta(days=30)
KEEP_UNUSED_TEXTS: Final = timedelta(days=1)
BATCH: Final = 5_000


class Purge:
    """Deletes what has been kept long enough. Repeating it does nothing.

    It deletes settled deliveries after 7 days, attempts and the notes on follows after 30, registrations that led to
    nothing after 30 (`UnusedServers`), expired rotation challenges and blacklist rules, and shared texts without a row,
    which are left when somebody deletes rows by hand. It works in batches: one transaction must not hold SQLite's write
    lock for long.
    """

    def __init__(self, database: Database, *, clock: Clock | None = None) -> None:
        self._database = database
        self._clock = clock or SystemClock()
        self._unused_servers = UnusedServers(database, clock=self._clock)

    async def __call__(self) -> Mapping[str, object]:
        """Delete everything past its time. Return how many rows there were of each kind.

        Raises:
            SQLAlchemyError: the database failed; what was deleted by then is gone.
        """
        now = self._clock.now()
        return {
            "deliveries": await self._delete(DeliveryJob, col(DeliveryJob.settled_at) < now - KEEP_SETTLED_ROWS),
            "attempts": await self._delete(DeliveryAttempt, col(DeliveryAttempt.started_at) < now - KEEP_ATTEMPTS),
            "rotations": await self._delete(RotateChallengeToken, col(RotateChallengeToken.expires_at) < now),
            "follow_news": await self._delete(FollowNews, col(FollowNews.noted_at) < now - KEEP_FOLLOW_NEWS),
            "rules": await purge_expired(self._database, before=now),
            "texts": await self._delete(DeliveryPayload, _is_unused(now - KEEP_UNUSED_TEXTS)),
            "servers": await self._unused_servers.purge(),
        }

    async def _delete(
        self,
        model: type[DeliveryJob | DeliveryAttempt | RotateChallengeToken | FollowNews | DeliveryPayload],
        expired: ColumnElement[bool],
    ) -> int:
        batch = select(col(model.id)).where(expired).limit(BATCH)
        text = col(DeliveryJob.payload_id) if model is DeliveryJob else null()
        gone = delete(model).where(col(model.id).in_(batch)).returning(text)

        def delete_batch(connection: Connection) -> int:
            texts = connection.execute(gone).scalars().all()
            release(connection, texts)
            return len(texts)

        total = count = await self._database.transact(delete_batch)
        while count == BATCH:
            count = await self._database.transact(delete_batch)
            total += count
        return total


def _is_unused(before: datetime) -> ColumnElement[bool]:
    used = select(col(DeliveryJob.id)).where(col(DeliveryJob.payload_id) == col(DeliveryPayload.id)).exists()
    return (col(DeliveryPayload.created_at) < before) & ~used
