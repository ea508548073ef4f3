"""The relay ranking that the nightly analytics left in the database."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from sqlalchemy import select
from sqlmodel import col

from db import Database, RelayCandidate
from federation.base.cache import LoadingCache
from workers.clock import Clock, SystemClock

MAX_RANKED: Final = 50
MAX_AGE: Final = timedelta(days=7)
"""An older ranking says little about today."""
TTL: Final = timedelta(minutes=1)


class RelayRanking:
    """Callable: returns the peers that a delivery could go through, the best first.

    The ranking is at most a minute old, and empty without analytics of the last week.
    """

    def __init__(self, database: Database, *, clock: Clock | None = None) -> None:
        self._database = database
        self._clock = clock or SystemClock()
        self._ranking = LoadingCache(self._load, ttl=TTL, max_entries=1)

    async def __call__(self) -> Sequence[str]:
        return await self._ranking.get("")

    async def close(self) -> None:
        """Stop reading, and wait until nothing is being read any more."""
        await self._ranking.close()

    async def _load(self, _key: str) -> Sequence[str]:
        oldest = (self._clock.now() - MAX_AGE).date()
        query = (
            select(col(RelayCandidate.server_url))
            .where(col(RelayCandidate.as_of) >= oldest)
            .order_by(col(RelayCandidate.rank))
            .limit(MAX_RANKED)
        )
        async with self._database.read() as session:
            return list((await session.execute(query)).scalars())
