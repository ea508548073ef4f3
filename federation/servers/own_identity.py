"""Which of our key pairs we show at `/discover`, and introduce ourselves with.

Theory of operation. Whoever looks cannot be told apart, and takes another key than the one it knows for an impostor's.
While a rotation is under way the pair is shown that most servers know; so asking one server first, or none yet, changes
nothing for the others.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from sqlalchemy import func, select
from sqlmodel import col

from db import Database, Server
from federation.protocol.keys import KeyRing, OwnKeys
from workers.clock import monotonic

COUNT_INTERVAL: Final = timedelta(seconds=5)


class OwnIdentity:
    """Knows what to show of *ring*."""

    def __init__(self, ring: KeyRing, database: Database) -> None:
        self.ring = ring
        self._database = database
        self._shows_newest = False
        self._counted: float | None = None

    async def shown(self) -> OwnKeys:
        """The pair that most servers know us by, as it was some seconds ago; the newest, where we have just one.

        Raises:
            SQLAlchemyError: the database failed.
        """
        newest, *older = self.ring.pairs()
        if not older:
            self._counted = None
            return newest
        if self._counted is None or monotonic() - self._counted >= COUNT_INTERVAL.total_seconds():
            self._shows_newest = await self._is_known_to_most(newest)
            self._counted = monotonic()
        return newest if self._shows_newest else older[-1]

    async def known_from_now_on(self) -> str | None:
        """By which key a server that meets us now will know us; None where we have just one pair.

        Raises:
            SQLAlchemyError: the database failed.
        """
        return (await self.shown()).signing.public_text if len(self.ring.pairs()) > 1 else None

    async def _is_known_to_most(self, pair: OwnKeys) -> bool:
        knows = col(Server.knows_key) == pair.signing.public_text
        query = select(func.count(), func.count().filter(knows))
        async with self._database.read() as session:
            everybody, confirmed = (await session.execute(query.select_from(Server))).one()
        return bool(2 * confirmed >= everybody)
