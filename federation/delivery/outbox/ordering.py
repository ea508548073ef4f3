"""Where a new delivery stands: sent at once, or held because of its server, or behind older ones of its ordering key.

Theory of operation. The database keeps the order, so it holds on every queue: of the deliveries of one key to one
server, all but the oldest are held for `order`. A transaction that adds one takes the key's lock, looks which ones
exist, and inserts the new one behind them; the transaction that ends the oldest makes the next one ready, by
`transitions.next_in_order`. On SQLite the only write lock is that lock. Positions are counted, not dated, because a
clock may be set back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, delete, func, select, text
from sqlalchemy.orm import Session

from db import DEFAULT_WIRE, HoldReason, among
from federation.delivery.rows import OPEN_STATES, TABLE, release
from federation.servers.links import closed_among


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceInOrder:
    """What a new delivery to one server waits for, None for nothing, and its place among those of its key."""

    held: HoldReason | None = None
    position: int | None = None


def stand(
    session: Session, server_urls: Sequence[str], ordering_key: str | None, wire: str = DEFAULT_WIRE
) -> dict[str, PlaceInOrder]:
    """Return how a delivery to each server stands that this transaction adds, by that wire.

    Call it right before adding them. With a key it holds the key's lock until the transaction ends, and removes
    deliveries of the key that were given up.
    """
    if ordering_key is not None:
        session.flush()  # deliveries of the key that this session added
    return _stand(session.connection(), server_urls, ordering_key, wire)


def cancelled_unsent(session: Session, server_url: str, ordering_key: str, job_name: str) -> bool:
    """Remove the youngest delivery of the key if it has that name and was never attempted.

    Return whether it was removed.
    """
    session.flush()
    return _cancel_unsent(session.connection(), server_url, ordering_key, job_name)


def lock_keys(connection: Connection, keys: Collection[str]) -> None:
    """Keep all others from adding deliveries of these keys until the transaction ends.

    On SQLite nothing has to be done: the caller is the only writer.
    """
    for key in sorted(keys):
        _lock(connection, key)


def _stand(
    connection: Connection, server_urls: Sequence[str], ordering_key: str | None, wire: str
) -> dict[str, PlaceInOrder]:
    closed = closed_among(connection, server_urls, wire)
    if ordering_key is None:
        return {url: PlaceInOrder(held=HoldReason.SERVER if url in closed else None) for url in server_urls}
    _lock(connection, ordering_key)
    chosen = {"key": ordering_key, "servers": server_urls}
    release(connection, connection.execute(_GIVEN_UP, chosen).scalars().all())
    lines = {row.server_url: row for row in connection.execute(_LINES, chosen)}
    standings: dict[str, PlaceInOrder] = {}
    for url in server_urls:
        line = lines.get(url)
        held = HoldReason.ORDER if line is not None else HoldReason.SERVER if url in closed else None
        standings[url] = PlaceInOrder(held=held, position=(line.last or 0) + 1 if line is not None else 1)
    return standings


def _cancel_unsent(connection: Connection, server_url: str, ordering_key: str, job_name: str) -> bool:
    _lock(connection, ordering_key)
    last = connection.execute(_LAST, {"key": ordering_key, "server": server_url}).one_or_none()
    if last is None or last.job_name != job_name or last.attempts:
        return False
    release(connection, connection.execute(_REMOVED, {"row": last.id}).scalars().all())
    return True


def _lock(connection: Connection, ordering_key: str) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(_KEY_LOCK, {"key": ordering_key})


_KEY_LOCK = text("SELECT pg_advisory_xact_lock(hashtextextended('federation ordering key ' || :key, 0))")
_OF_KEY = (TABLE.c.ordering_key == bindparam("key"), among(TABLE.c.server_url, "servers"))
_LINES = (
    select(TABLE.c.server_url, func.max(TABLE.c.ordering_position).label("last"))
    .where(*_OF_KEY, TABLE.c.state.in_(OPEN_STATES))
    .group_by(TABLE.c.server_url)
)
_GIVEN_UP = delete(TABLE).where(*_OF_KEY, TABLE.c.state.not_in(OPEN_STATES)).returning(TABLE.c.payload_id)
_LAST = (
    select(TABLE.c.id, TABLE.c.job_name, TABLE.c.attempts)
    .where(
        TABLE.c.ordering_key == bindparam("key"),
        TABLE.c.server_url == bindparam("server"),
        TABLE.c.state.in_(OPEN_STATES),
    )
    .order_by(TABLE.c.ordering_position.desc())
    .limit(1)
    .with_for_update()
)
_REMOVED = delete(TABLE).where(TABLE.c.id == bindparam("row")).returning(TABLE.c.payload_id)
