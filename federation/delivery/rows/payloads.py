"""The texts of deliveries whose jobs refer to them instead of carrying a copy.

Theory of operation. Our jobs name their text by an id: the id of their own row, or of a `delivery_payloads` row which a
fan-out stored once. Either is written in the transaction that made the delivery's row, before the job exists, and is
removed in the transaction that removes the row, or the last of its rows. So a job whose text is gone has no row either:
the delivery is over, and only the job had not heard of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Final

from sqlalchemy import Connection, bindparam, delete, select, update
from sqlmodel import col

from db import Database, DeliveryPayload, among
from federation.base.cache import LoadingCache

SHARED_TTL: Final = timedelta(seconds=30)
MAX_SHARED: Final = 16
"""How many texts are cached at once; each has up to 2 MiB."""


class Payloads:
    """Reads the texts that several deliveries share, and caches them for a short time."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._shared = LoadingCache(self._load, ttl=SHARED_TTL, max_entries=MAX_SHARED)

    async def shared(self, payload_id: str) -> str | None:
        """Return the text, or None if it is gone, together with the last of its deliveries.

        Raises:
            SQLAlchemyError: the database did not answer.
        """
        return await self._shared.get(payload_id)

    async def close(self) -> None:
        """Stop reading, and wait until nothing is being read any more."""
        await self._shared.close()

    async def _load(self, payload_id: str) -> str | None:
        shared = await self._database.rows(_SHARED, {"text": payload_id})
        return shared[0].payload if shared else None


def release(connection: Connection, payload_ids: Iterable[str | None]) -> None:
    """Subtract one reference from a text for each id, and delete texts without any.

    The caller's transaction removed the rows.

    Nulls stand for rows with a text of their own. The texts are locked in the order of their ids, so that two such
    transactions never wait for each other.
    """
    counts = Counter(payload_id for payload_id in payload_ids if payload_id is not None)
    if not counts:
        return
    connection.execute(_RELEASE, [{"text": text, "rows": rows} for text, rows in sorted(counts.items())])
    free(connection, list(counts))


def free(connection: Connection, payload_ids: Sequence[str]) -> None:
    """Delete those of the texts to which no row refers; nothing for none."""
    if payload_ids:
        connection.execute(_FREE, {"texts": payload_ids})


_SHARED = select(col(DeliveryPayload.payload)).where(col(DeliveryPayload.id) == bindparam("text"))

_TABLE = DeliveryPayload.__table__  # type: ignore[attr-defined] # SQLModel adds it at run time

_RELEASE = update(_TABLE).where(_TABLE.c.id == bindparam("text")).values(refs=_TABLE.c.refs - bindparam("rows"))
_FREE = delete(_TABLE).where(among(_TABLE.c.id, "texts"), _TABLE.c.refs <= 0)
