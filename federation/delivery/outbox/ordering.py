"""Where a new delivery stands: sent at once, or held because of its server, or behind older ones of its ordering key.

Theory of operation. The database keeps the order, so it holds on every queue: of the deliveries of one key to one
server, all but the oldest are held for `order`. A transaction that adds one takes the key's lock, looks which ones
exist, and inserts the new one behind them; the transaction that ends the oldest makes the next one ready, by
`rows.next_in_order`. On SQLite the only write lock is that lock. Lines of one thing share a lock, see `ordering_keys`.
Positions are counted, not dated, because a clock may be set back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias

from sqlalchemy import Connection, bindparam, delete, func, select, text
from sqlalchemy.orm import Session

from db import DEFAULT_WIRE, HoldReason, among
from federation.delivery.outbox.ordering_keys import locked_part
from federation.delivery.rows import OPEN_STATES, TABLE, release
from federation.servers.links import closed_among

ASKED_AT_ONCE: Final = 1_000
"""Keys or servers in one statement."""

Line: TypeAlias = tuple[str, str | None]
"""The server, and the ordering key or None."""


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


def stand_apart(session: Session, lines: Sequence[Line], wire: str) -> list[PlaceInOrder]:
    """Return how deliveries stand that this transaction adds, each in a line of its own, as `stand` does for one key.

    No line may be there twice: its second delivery would not know of the first.
    """
    session.flush()  # deliveries of the keys that this session added
    connection = session.connection()
    keys = [key for _, key in lines if key is not None]
    lock_keys(connection, keys)
    closed: set[str] = set()
    for servers in _batches(list(dict.fromkeys(server_url for server_url, _ in lines))):
        closed |= closed_among(connection, servers, wire)
    last = _last_of_lines(connection, lines)
    return [_place(line, last, is_closed=line[0] in closed) for line in lines]


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
    if connection.dialect.name == "postgresql":
        for part in sorted({locked_part(key) for key in keys}):
            connection.execute(_KEY_LOCK, {"key": part})


def _stand(
    connection: Connection, server_urls: Sequence[str], ordering_key: str | None, wire: str
) -> dict[str, PlaceInOrder]:
    closed = closed_among(connection, server_urls, wire)
    if ordering_key is None:
        return {url: PlaceInOrder(held=HoldReason.SERVER if url in closed else None) for url in server_urls}
    lock_keys(connection, [ordering_key])
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
    lock_keys(connection, [ordering_key])
    last = connection.execute(_LAST, {"key": ordering_key, "server": server_url}).one_or_none()
    if last is None or last.job_name != job_name or last.attempts:
        return False
    release(connection, connection.execute(_REMOVED, {"row": last.id}).scalars().all())
    return True


def _batches(items: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(items), ASKED_AT_ONCE):
        yield items[start : start + ASKED_AT_ONCE]


def _last_of_lines(connection: Connection, lines: Sequence[Line]) -> dict[Line, int]:
    """Return the last position of each line in which something is owed, and remove what was given up in any."""
    wanted = frozenset(lines)
    last: dict[Line, int] = {}
    given_up: list[str] = []
    for keys in _batches(list(dict.fromkeys(key for _, key in lines if key is not None))):
        for row in connection.execute(_OF_LINES, {"keys": keys}):
            line = row.server_url, row.ordering_key
            if line in wanted and row.state in OPEN_STATES:
                last[line] = max(last.get(line, 0), row.ordering_position or 0)
            elif line in wanted:
                given_up.append(row.id)
    for rows in _batches(given_up):
        release(connection, connection.execute(_FORGOTTEN, {"rows": rows}).scalars().all())
    return last


def _place(line: Line, last: Mapping[Line, int], *, is_closed: bool) -> PlaceInOrder:
    held = HoldReason.ORDER if line in last else HoldReason.SERVER if is_closed else None
    return _place_in_order(held, None if line[1] is None else last.get(line, 0) + 1)


@lru_cache(maxsize=64)
def _place_in_order(held: HoldReason | None, position: int | None) -> PlaceInOrder:
    """Return the same object for the same place: most are first in line, and garbage collections count objects."""
    return PlaceInOrder(held=held, position=position)


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
_OF_LINES = select(
    *(TABLE.c[name] for name in ("id", "server_url", "ordering_key", "ordering_position", "state"))
).where(among(TABLE.c.ordering_key, "keys"))
_FORGOTTEN = (
    delete(TABLE).where(among(TABLE.c.id, "rows"), TABLE.c.state.not_in(OPEN_STATES)).returning(TABLE.c.payload_id)
)
_REMOVED = delete(TABLE).where(TABLE.c.id == bindparam("row")).returning(TABLE.c.payload_id)
