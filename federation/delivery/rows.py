"""Changes to the rows of deliveries, and to their texts, within one transaction of the caller.

Theory of operation. Rows are begun, ended, held, released, put in order. They are locked in the order of their ids, so
that two such transactions never wait for each other; the caller adds the jobs that follow from a change, after the
commit.

Our jobs name their text by an id instead of carrying a copy: the id of their own row, or of a `delivery_payloads` row
which a fan-out stored once. Either is written in the transaction that made the delivery's row, before the job exists,
and is removed in the transaction that removes the row, or the last of its rows. So a job whose text is gone has no row
either: the delivery is over, and only the job had not heard of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any, Final, TypeAlias

from sqlalchemy import Connection, Row, Text, bindparam, cast, delete, select, update
from sqlmodel import col

from db import Database, DeliveryJob, DeliveryPayload, DeliveryState, HoldReason, among
from federation.base.cache import LoadingCache
from federation.base.queues.job_data import FederationDeliveryJob
from workers.metadata import decode_meta

OPEN_STATES: Final = (DeliveryState.READY, DeliveryState.HELD)
"""The states of deliveries that are owed; those in any other state are given up."""

PlannedJob: TypeAlias = tuple[str, object, dict[str, object]]
"""A job as `JobQueue.add_bulk` takes it."""


def series_job_id(delivery_id: str, series: int) -> str:
    """Return the job id of a delivery's series `series`.

    The first series has the row's id, as with Node's producers.
    """
    return delivery_id if series == 0 else f"{delivery_id}.{series}"


def row_of_job(job_id: str) -> str:
    """Return the id of the delivery that one of our jobs acts for, given the job's id."""
    row, dot, series = job_id.rpartition(".")
    return row if dot and series.isdecimal() else job_id


def delivery_job(
    name: str,
    delivery_id: str,
    *,
    target_url: str,
    server_url: str,
    payload_id: str | None,
    series: int = 0,
    suspect: int | None = None,
    trace: str | None = None,
) -> PlannedJob:
    """Build the job of one of a delivery's series. If `payload_id` is None, the row has the text.

    `trace` is that of whoever owed it, as the row has it.
    """
    data = FederationDeliveryJob(
        delivery_job_id=delivery_id,
        target_url=target_url,
        server_url=server_url,
        payload="",
        payload_id=payload_id or delivery_id,
        suspect=suspect is not None,
    )
    options: dict[str, object] = {"jobId": series_job_id(delivery_id, series)}
    return (name, data.to_wire(), options if trace is None else {**options, "meta": decode_meta(trace)})


@dataclass(frozen=True, slots=True, kw_only=True)
class OwedRow:
    """What a row says about the job that it should have."""

    id: str
    job_name: str
    target_url: str
    server_url: str
    payload_id: str | None
    series: int
    suspect: int | None
    trace: str | None

    def job(self) -> PlannedJob:
        return delivery_job(
            self.job_name,
            self.id,
            target_url=self.target_url,
            server_url=self.server_url,
            payload_id=self.payload_id,
            series=self.series,
            suspect=self.suspect,
            trace=self.trace,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a delivery that is over stood among those of its ordering key."""

    server_url: str
    ordering_key: str


def made_ready(connection: Connection, ids: Collection[str], now: datetime, *, released: bool = True) -> list[OwedRow]:
    """Make those of the rows ready that are held, for a new series of attempts. The caller has to add their jobs.

    With `released` they count as sent to a server that is back, until they are tried: see `Releaser`.
    """
    if not ids:
        return []
    rows = connection.execute(_LOCKED, {"rows": sorted(ids)}).all()
    held = [row for row in rows if row.state is DeliveryState.HELD]
    if not held:
        return []
    connection.execute(_READY, {"rows": [row.id for row in held], "at": now if released else None})
    names = [field.name for field in fields(OwedRow) if field.name != "series"]
    return [OwedRow(**{name: row._mapping[name] for name in names}, series=row.series + 1) for row in held]


def next_in_order(connection: Connection, places: Iterable[Place], now: datetime) -> list[OwedRow]:
    """Make the next delivery of each key ready whose oldest is over, unless something else holds it."""
    ids: list[str] = []
    for place in dict.fromkeys(places):
        first = connection.execute(_FIRST, {"server": place.server_url, "key": place.ordering_key}).one_or_none()
        if first is not None and first.state is DeliveryState.HELD and first.held_reason is HoldReason.ORDER:
            ids.append(first.id)
    return made_ready(connection, ids, now, released=False)


def forget_older(connection: Connection, arrived: Sequence[Row[*tuple[Any, ...]]]) -> list[str | None]:
    """Remove deliveries of the same keys that were given up before these ones, which arrived.

    A retry by hand would undo them.

    Returns the ids of their texts, which the caller has to release.
    """
    positions = {(row.ordering_key, row.server_url): row.ordering_position for row in arrived}
    found = connection.execute(_GIVEN_UP, {"keys": [row.ordering_key for row in arrived]}).all()
    older = [
        row for row in found if (positions.get((row.ordering_key, row.server_url)) or 0) > (row.ordering_position or 0)
    ]
    if older:
        connection.execute(_FORGOTTEN, {"rows": [row.id for row in older]})
    return [row.payload_id for row in older]


def places_of(rows: Sequence[Row[*tuple[Any, ...]]]) -> list[Place]:
    """Return the places of those rows that have an `ordering_key`."""
    return [
        Place(server_url=row.server_url, ordering_key=row.ordering_key) for row in rows if row.ordering_key is not None
    ]


TABLE: Final = DeliveryJob.__table__  # type: ignore[attr-defined] # SQLModel adds it at run time; Core skips the ORM

READY: Final = select(*(TABLE.c[field.name] for field in fields(OwedRow))).where(
    among(TABLE.c.id, "ids"), TABLE.c.state == DeliveryState.READY
)
_LOCKED = (
    select(*(TABLE.c[field.name] for field in fields(OwedRow)), TABLE.c.state)
    .where(among(TABLE.c.id, "rows"))
    .order_by(TABLE.c.id)
    .with_for_update()
)
_READY = (
    update(TABLE)
    .where(among(TABLE.c.id, "rows"))
    .values(
        state=DeliveryState.READY,
        held_reason=None,
        held_at=None,
        next_attempt_at=None,
        settled_at=None,
        series=TABLE.c.series + 1,
        job_id=TABLE.c.id + "." + cast(TABLE.c.series + 1, Text),  # as `series_job_id`
        released_at=bindparam("at"),
        queued_at=None,
        first_attempted_at=None,
        sending=None,
    )
)
_FIRST = (
    select(TABLE.c.id, TABLE.c.state, TABLE.c.held_reason)
    .where(
        TABLE.c.server_url == bindparam("server"),
        TABLE.c.ordering_key == bindparam("key"),
        TABLE.c.state.in_(OPEN_STATES),
    )
    .order_by(TABLE.c.ordering_position)
    .limit(1)
    .with_for_update()
)
_GIVEN_UP = (
    select(*(TABLE.c[name] for name in ("id", "payload_id", "server_url", "ordering_key", "ordering_position")))
    .where(
        among(TABLE.c.ordering_key, "keys"),
        TABLE.c.state.not_in(OPEN_STATES),
    )
    .order_by(TABLE.c.id)
    .with_for_update()
)
_FORGOTTEN = delete(TABLE).where(among(TABLE.c.id, "rows"))


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

_TEXTS = DeliveryPayload.__table__  # type: ignore[attr-defined] # SQLModel adds it at run time

_RELEASE = update(_TEXTS).where(_TEXTS.c.id == bindparam("text")).values(refs=_TEXTS.c.refs - bindparam("rows"))
_FREE = delete(_TEXTS).where(among(_TEXTS.c.id, "texts"), _TEXTS.c.refs <= 0)
