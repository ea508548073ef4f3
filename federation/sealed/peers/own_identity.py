"""Which of our key pairs we show at `/discover`, and use to introduce ourselves.

Theory of operation. A server takes any key but the one it knows for an impostor's. While a rotation is under way, a
server that names itself is shown the pair that it knows; anybody may name it, but keys are public. All others cannot be
told apart, and are shown the pair that most servers know, of those that are reachable. So asking one server first, or
none yet, changes nothing for the others.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import structlog
from sqlalchemy import func, select
from sqlmodel import col

from db import Database, Server
from federation.protocol.keys import KeyRing, OwnKeys, pair_known_by
from workers.clock import monotonic

log = structlog.get_logger(__name__)

COUNT_INTERVAL: Final = timedelta(seconds=5)
TELL_INTERVAL: Final = timedelta(minutes=1)


class OwnIdentity:
    """Decides which pair of *ring* to show."""

    def __init__(self, ring: KeyRing, database: Database) -> None:
        self.ring = ring
        self._database = database
        self._shows_newest = False
        self._counted: float | None = None
        self._told: float | None = None

    async def shown(self, to: str | None = None) -> OwnKeys:
        """Return the pair that most servers know us by, as of a few seconds ago. If we have just one, it is that one.

        With *to*, the canonical URL of a server, return the pair that it knows, if it is registered.

        Raises:
            SQLAlchemyError: the database failed.
        """
        known = None if to is None else await self._known_by(to)
        if known is not None:
            return known
        newest, *older = self.ring.pairs()
        if not older:
            self._counted = None
            return newest
        if self._counted is None or monotonic() - self._counted >= COUNT_INTERVAL.total_seconds():
            self._shows_newest = await self._is_known_to_most(newest)
            self._counted = monotonic()
        return newest if self._shows_newest else older[-1]

    async def known_from_now_on(self) -> str | None:
        """Return the key by which a server that meets us now will know us, or None if we have just one pair.

        Raises:
            SQLAlchemyError: the database failed.
        """
        return (await self.shown()).signing.public_text if len(self.ring.pairs()) > 1 else None

    async def _known_by(self, server_url: str) -> OwnKeys | None:
        query = select(col(Server.knows_key)).where(col(Server.url) == server_url)
        async with self._database.read() as session:
            row = (await session.execute(query)).one_or_none()
        if row is None:
            return None
        pair = pair_known_by(self.ring, row[0])
        if pair is None and (self._told is None or monotonic() - self._told >= TELL_INTERVAL.total_seconds()):
            self._told = monotonic()
            log.error("own_keys_missing", server_url=server_url, advice="restart this process, or set the keys")
        return pair

    async def _is_known_to_most(self, pair: OwnKeys) -> bool:
        """Tell whether most servers know the pair. Only healthy ones count, if there are any.

        Registries are full of servers that never return.
        """
        knows, is_there = col(Server.knows_key) == pair.signing.public_text, col(Server.is_healthy)
        query = select(
            func.count(),
            func.count().filter(knows),
            func.count().filter(is_there),
            func.count().filter(knows, is_there),
        )
        async with self._database.read() as session:
            all_, all_knowing, there, there_knowing = (await session.execute(query.select_from(Server))).one()
        everybody, confirmed = (there, there_knowing) if there else (all_, all_knowing)
        return bool(2 * confirmed >= everybody)
