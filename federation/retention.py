"""Removing what has been kept long enough."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, TypeAlias

from sqlalchemy import ColumnElement, Connection, Row, and_, delete, insert, null, or_, select
from sqlalchemy.orm import aliased
from sqlmodel import col

from db import (
    AdminAction,
    BulkJob,
    Database,
    DeliveryAttempt,
    DeliveryJob,
    DeliveryLoss,
    DeliveryPayload,
    DeliveryState,
    FederationTable,
    ServerHealthEvent,
)
from federation.delivery.held.sweep_times import Sweeps
from federation.delivery.rows import release
from federation.servers.blacklist import purge_expired
from workers.clock import Clock, SystemClock

KEEP_SETTLED_ROWS: Final = timedelta(days=7)
KEEP_ATTEMPTS: Final = timedelta(days=30)
"""How long attempts are kept unless the settings say otherwise."""
KEEP_HISTORY: Final = timedelta(days=365)
"""How long losses and changes of health are kept, for the analytics, and what operators did, for whoever asks."""
KEEP_UNUSED_TEXTS: Final = timedelta(days=1)
BATCH: Final = 5_000

PurgeWire: TypeAlias = Callable[[datetime], Awaitable[Mapping[str, int]]]
"""Deletes what a wire has kept long enough at that time, and returns how many rows of each kind there were."""
_Kept: TypeAlias = (
    AdminAction | BulkJob | DeliveryJob | DeliveryAttempt | DeliveryLoss | DeliveryPayload | ServerHealthEvent
)
_OF_LOSS: Final = tuple(
    FederationTable.metadata.tables["delivery_jobs"].c[name]
    for name in ("id", "server_url", "job_name", "state", "error_code", "created_at", "settled_at")
)


class Purge:
    """Deletes what has been kept long enough. Repeating it does nothing.

    It deletes settled deliveries after 7 days, and writes down which were lost; attempts after `keep_attempts`; what
    was written down of losses, of what operators did and of changes of health after a year, but not the last change of
    a server's, expired blacklist rules, shared texts without a row, which are left when somebody deletes rows by hand,
    and what wires have kept for themselves. It works in batches: one transaction must not hold SQLite's write
    lock for long. With `sweeps` it deletes nothing while these leave open whether the clock can be believed.
    """

    def __init__(
        self,
        database: Database,
        *,
        of_wires: Sequence[PurgeWire] = (),
        sweeps: Sweeps | None = None,
        keep_attempts: timedelta = KEEP_ATTEMPTS,
        clock: Clock | None = None,
    ) -> None:
        self._database = database
        self._of_wires = of_wires
        self._sweeps = sweeps
        self._keep_attempts = keep_attempts
        self._clock = clock or SystemClock()

    async def __call__(self) -> Mapping[str, object]:
        """Delete everything past its time. Return how many rows there were of each kind, or that all were spared.

        Raises:
            SQLAlchemyError: the database failed; what was deleted by then is gone.
        """
        now = self._clock.now()
        last = None if self._sweeps is None else await self._sweeps.last()
        if last is not None and last.spares(now):
            return {"spared": True}
        return {
            "deliveries": await self._delete(DeliveryJob, _was_settled(now - KEEP_SETTLED_ROWS, now)),
            "attempts": await self._delete(
                DeliveryAttempt, col(DeliveryAttempt.started_at) < now - self._keep_attempts
            ),
            "rules": await purge_expired(self._database, before=now),
            "texts": await self._delete(DeliveryPayload, _is_unused(now - KEEP_UNUSED_TEXTS)),
            "health_events": await self._delete(ServerHealthEvent, _is_told_by_a_later(now - KEEP_HISTORY)),
            "actions": await self._delete(AdminAction, col(AdminAction.at) < now - KEEP_HISTORY),
            "bulk_jobs": await self._delete(BulkJob, col(BulkJob.created_at) < now - KEEP_HISTORY),
            "losses": await self._delete(DeliveryLoss, col(DeliveryLoss.lost_at) < now - KEEP_HISTORY),
            **{kind: count for purge in self._of_wires for kind, count in (await purge(now)).items()},
        }

    async def _delete(self, model: type[_Kept], expired: ColumnElement[bool]) -> int:
        batch = select(col(model.id)).where(expired).limit(BATCH)
        columns = (col(DeliveryJob.payload_id), *_OF_LOSS) if model is DeliveryJob else (null(),)
        gone = delete(model).where(col(model.id).in_(batch)).returning(*columns)

        def delete_batch(connection: Connection) -> int:
            rows = connection.execute(gone).all()
            if rows and model is DeliveryJob:
                release(connection, [row.payload_id for row in rows])
                connection.execute(insert(DeliveryLoss), [_loss(row) for row in rows])
            return len(rows)

        return await in_batches(self._database, delete_batch, BATCH)


async def in_batches(database: Database, delete_batch: Callable[[Connection], int], size: int) -> int:
    """Delete batches of that size, each in a transaction of its own, until one is not full. Return how many went."""
    total = count = await database.transact(delete_batch)
    while count == size:
        count = await database.transact(delete_batch)
        total += count
    return total


def _loss(row: Row[*tuple[Any, ...]]) -> dict[str, object]:
    """Return what is written down of a delivery that ends with its row: a delivered one has none any more."""
    expired = row.state is DeliveryState.EXPIRED
    return {
        "id": row.id,
        "server_url": row.server_url,
        "job_name": row.job_name,
        "state": DeliveryState.EXPIRED if expired else DeliveryState.FAILED,  # an earlier version's row is `ready`
        "error_code": row.error_code,
        "created_at": row.created_at,
        "lost_at": row.settled_at,
    }


def _was_settled(before: datetime, now: datetime) -> ColumnElement[bool]:
    """Tell which deliveries were settled before that.

    They were made earlier still, and are not held: so an index by state and time has them together. Without it, each
    batch would look at all that is held. A time in the future was written before the clock was set back.
    """
    settled = [state for state in DeliveryState if state is not DeliveryState.HELD]
    return and_(
        col(DeliveryJob.state).in_(settled),
        or_(col(DeliveryJob.created_at) < before, col(DeliveryJob.created_at) > now),
        col(DeliveryJob.settled_at) < before,
    )


def _is_told_by_a_later(before: datetime) -> ColumnElement[bool]:
    """Tell which old changes of health do not say how the server is now."""
    later = aliased(ServerHealthEvent)
    same_server = col(later.server_url) == col(ServerHealthEvent.server_url)
    follows = select(col(later.id)).where(same_server, col(later.id) > col(ServerHealthEvent.id)).exists()
    return (col(ServerHealthEvent.at) < before) & follows


def _is_unused(before: datetime) -> ColumnElement[bool]:
    used = select(col(DeliveryJob.id)).where(col(DeliveryJob.payload_id) == col(DeliveryPayload.id)).exists()
    return (col(DeliveryPayload.created_at) < before) & ~used
