"""The texts of deliveries whose jobs refer to them instead of carrying a copy.

Theory of operation. A job of ours names its text by an id: its own row's, or that of a `delivery_payloads` row which a
fan-out stored once. Either is written in the transaction that made the delivery's row, before the job exists, and goes
in the transaction that removes the row (the last of its rows). So a job whose text is gone has no row either: the
delivery is over, and only the job had not heard of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Final

from sqlalchemy import Connection, bindparam, delete, select, update
from sqlmodel import col

from db import Database, DeliveryJob, DeliveryPayload
from federation.base.jobs import FederationDeliveryJob
from federation.servers.cache import LoadingCache
from workers.gathering import Gathering

MAX_GROUP: Final = 200
SHARED_TTL: Final = timedelta(seconds=30)
MAX_SHARED: Final = 16
"""Texts held at once; each has up to 2 MiB."""


class Payloads:
    """Reads texts: those of rows in groups, those that are shared once in a while."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._own: Gathering[str, str | None] = Gathering(self._of_rows, MAX_GROUP)
        self._shared = LoadingCache(self._load_shared, ttl=SHARED_TTL, max_entries=MAX_SHARED)

    async def text(self, delivery: FederationDeliveryJob) -> str | None:
        """The delivery's payload; None if it is over, and its row and text are gone.

        Raises:
            SQLAlchemyError: the database did not answer.
        """
        if delivery.payload_id is None:
            return delivery.payload
        if delivery.payload_id == delivery.delivery_job_id:
            return await self._own.ask(delivery.payload_id)
        return await self._shared.get(delivery.payload_id)

    async def close(self) -> None:
        """Nothing is being read any more."""
        await self._shared.close()

    async def _of_rows(self, ids: Sequence[str]) -> list[str | None]:
        texts = {row.id: row.payload for row in await self._database.rows(_OWN, {"ids": ids})}
        return [texts.get(row_id) for row_id in ids]

    async def _load_shared(self, payload_id: str) -> str | None:
        shared = await self._database.rows(_SHARED, {"text": payload_id})
        return shared[0].payload if shared else None


def release(connection: Connection, payload_ids: Iterable[str | None]) -> None:
    """Each id stands for a row that this transaction removed: its text has one reference less, and goes with the last.

    Nulls are rows with a text of their own. Locks the texts in the order of their ids, so that two such transactions
    never wait for each other.
    """
    counts = Counter(payload_id for payload_id in payload_ids if payload_id is not None)
    if not counts:
        return
    connection.execute(_RELEASE, [{"text": text, "rows": rows} for text, rows in sorted(counts.items())])
    connection.execute(
        delete(DeliveryPayload).where(col(DeliveryPayload.id).in_(counts), col(DeliveryPayload.refs) <= 0)
    )


_OWN = select(col(DeliveryJob.id), col(DeliveryJob.payload)).where(
    col(DeliveryJob.id).in_(bindparam("ids", expanding=True))
)

_SHARED = select(col(DeliveryPayload.payload)).where(col(DeliveryPayload.id) == bindparam("text"))

_TABLE = DeliveryPayload.__table__  # type: ignore[attr-defined] # SQLModel adds it at run time

_RELEASE = update(_TABLE).where(_TABLE.c.id == bindparam("text")).values(refs=_TABLE.c.refs - bindparam("rows"))
