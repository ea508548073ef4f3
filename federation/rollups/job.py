"""The recurring job that counts ahead of time; how many deliveries there are in each state, and why they are held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Final

from sqlalchemy import Connection, delete, func, insert, select
from sqlmodel import col

from db import Database, DeliveryJob, DeliveryState, DeliveryTotal, ServerSummary
from federation.rollups.attempts import AttemptMinutes
from federation.rollups.servers import ServerSummaries
from workers.clock import Clock, SystemClock, monotonic

_BY_SERVER: Final = (DeliveryState.READY, DeliveryState.FAILED, DeliveryState.EXPIRED)


class DeliveryTotals:
    """Brings `delivery_totals` up to date, after `ServerSummaries`: it adds up what these say."""

    def __init__(self, database: Database, *, clock: Clock | None = None) -> None:
        self._database = database
        self._clock = clock or SystemClock()

    async def __call__(self) -> None:
        """Count anew.

        Raises:
            SQLAlchemyError: the database failed; what was counted before stays.
        """
        [of_servers] = await self._database.rows(_OF_SERVERS)
        counts = {(state, ""): int(of_servers._mapping[state.value]) for state in _BY_SERVER}
        for state, number in await self._database.rows(_UNNAMED):
            counts[state, ""] = counts.get((state, ""), 0) + number
        for reason, number in await self._database.rows(_HELD):
            counts[DeliveryState.HELD, "" if reason is None else reason.value] = number
        now = self._clock.now()
        rows = [
            {"state": state, "held_reason": reason, "deliveries": number, "counted_at": now}
            for (state, reason), number in counts.items()
        ]
        await self._database.transact(lambda connection: _replace(connection, rows))


def _replace(connection: Connection, rows: Sequence[dict[str, object]]) -> None:
    connection.execute(delete(DeliveryTotal))
    connection.execute(insert(DeliveryTotal), rows)


_OF_SERVERS: Final = select(
    *(func.coalesce(func.sum(col(getattr(ServerSummary, each.value))), 0).label(each.value) for each in _BY_SERVER)
)
_UNNAMED: Final = (
    select(col(DeliveryJob.state), func.count())
    .where(col(DeliveryJob.server_url).is_(None), col(DeliveryJob.state).in_(_BY_SERVER))
    .group_by(col(DeliveryJob.state))
)
"""Rows of Node producers, until their first job is met."""
_HELD: Final = (
    select(col(DeliveryJob.held_reason), func.count())
    .where(col(DeliveryJob.state) == DeliveryState.HELD)
    .group_by(col(DeliveryJob.held_reason))
)


INTERVAL: Final = timedelta(seconds=30)
SHARE: Final = 100
"""Deliveries are counted anew once this many times as long has passed as the last count took: one per cent."""


class Rollups:
    """Counts attempts each time it is called, and deliveries as often as it may by how long that takes."""

    def __init__(self, database: Database, *, clock: Clock | None = None) -> None:
        self._minutes = AttemptMinutes(database, clock=clock)
        self._servers = ServerSummaries(database, clock=clock)
        self._totals = DeliveryTotals(database, clock=clock)
        self._due = 0.0

    async def __call__(self) -> Mapping[str, object]:
        """Bring all counts up to date. Return how many attempts were counted, and how many servers had changed.

        Raises:
            SQLAlchemyError: the database failed; the next call does the rest.
        """
        attempts = await self._minutes()
        began = monotonic()
        if began < self._due:
            return {"attempts": attempts}
        servers = await self._servers()
        await self._totals()
        ended = monotonic()
        self._due = ended + SHARE * (ended - began)
        return {"attempts": attempts, "servers": servers}
