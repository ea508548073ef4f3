"""The recurring job that counts ahead of time."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Final

from db import Database
from federation.rollups.attempts import AttemptMinutes
from federation.rollups.servers import ServerSummaries
from federation.rollups.totals import DeliveryTotals
from workers.clock import Clock, monotonic

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
