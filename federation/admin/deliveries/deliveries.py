"""What an administrator sees of deliveries: which are owed, held or given up, why, and where they pile up.

A delivered delivery has no row. Ready and held ones are owed; failed and expired ones are kept for a week.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final, Literal, TypeAlias, TypeVar

from sqlalchemy import ColumnElement, Executable, Row, Select, and_, case, distinct, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlmodel import col

from db import AttemptNote, Database, DeliveryAttempt, DeliveryJob, DeliveryPayload, DeliveryState, HoldReason
from federation.admin.words import ended
from federation.protocol.urls import canonical_origin

MAX_ATTEMPTS_SHOWN: Final = 50

K = TypeVar("K")

OPEN: Final = "open"
"""Stands for the deliveries that are owed: ready or held."""

AnyState: TypeAlias = DeliveryState | Literal["open"]


class Age(StrEnum):
    """How long a delivery has been owed."""

    MINUTE = "under a minute"
    HOUR = "under an hour"
    DAY = "under a day"
    OLDER = "a day and more"


_AGES: Final = ((Age.MINUTE, timedelta(minutes=1)), (Age.HOUR, timedelta(hours=1)), (Age.DAY, timedelta(days=1)))

Group: TypeAlias = Row[DeliveryState, HoldReason | None, str | None, str, int, datetime]
"""Deliveries that are alike: their state, why they are held, code, age, number, and when the first of them was made."""


def is_in(state: AnyState) -> ColumnElement[bool]:
    """Return the condition for rows in the state."""
    if state == OPEN:
        return or_(is_in(DeliveryState.READY), is_in(DeliveryState.HELD))
    return col(DeliveryJob.state) == state


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which deliveries are meant: those that meet everything that is set.

    `code` is that of the last failed attempt; `older_than` counts from when the delivery was made. `activity_id` is
    the id of an activity that is sent by ActivityPub, `inbox` the whole URL that it is sent to.
    """

    server_url: str | None = None
    state: AnyState | None = None
    code: str | None = None
    older_than: timedelta | None = None
    ids: tuple[str, ...] = ()
    activity_id: str | None = None
    inbox: str | None = None

    @property
    def is_everything(self) -> bool:
        return self == Selection()

    def conditions(self) -> list[ColumnElement[bool]]:
        """Return the selection as SQL conditions."""
        conditions: list[ColumnElement[bool]] = []
        if self.ids:
            conditions.append(col(DeliveryJob.id).in_(self.ids))
        if self.server_url is not None:
            conditions.append(_is_for(self.server_url))
        if self.state is not None:
            conditions.append(is_in(self.state))
        if self.code is not None:
            conditions.append(col(DeliveryJob.error_code) == self.code)
        if self.older_than is not None:
            conditions.append(col(DeliveryJob.created_at) < datetime.now(UTC) - self.older_than)
        if self.activity_id is not None:
            conditions.append(says(self.activity_id))
        if self.inbox is not None:
            conditions += [_is_for(canonical_origin(self.inbox)), col(DeliveryJob.target_url) == self.inbox]
        return conditions


def says(activity_id: str) -> ColumnElement[bool]:
    """Return the condition for deliveries of an activity."""
    texts = select(col(DeliveryPayload.id)).where(col(DeliveryPayload.activity_id) == activity_id)
    return col(DeliveryJob.payload_id).in_(texts)


async def whole_ids(database: Database, ids: Iterable[str], *, shortest: int) -> tuple[str, ...]:
    """Return each id, or the one that ends with it, as lists show them; what belongs to no delivery stays as it is.

    An end has at least *shortest* characters.

    Raises:
        ValueError: several end with it.
    """
    given = tuple(ids)
    async with database.read() as session:
        found = await session.execute(select(col(DeliveryJob.id)).where(col(DeliveryJob.id).in_(given)))
        known = set(found.scalars())
        ends = [each for each in given if each not in known and len(each) >= shortest]
        whole = {each: await _whole_id(session, each) for each in ends}
    return tuple(whole.get(each, each) for each in given)


async def _whole_id(session: AsyncSession, text: str) -> str:
    wanted = col(DeliveryJob.id)
    end = func.substr(wanted, func.length(wanted) - len(text) + 1)  # SQLite's LIKE takes capitals for small letters
    query = select(wanted).where(end == text).order_by(wanted).limit(3)
    found = (await session.execute(query)).scalars().all()
    if len(found) > 1:
        raise ValueError(f"more than one delivery's id ends with {text}: {', '.join(found)}")
    return found[0] if found else text


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryRow:
    """One delivery without its text.

    `held_until` is when a held one is released, if that is known; `error_code` and `last_error` are of the last attempt
    that failed. `activity_id` is what the activity is called that it sends, and `actor` who signs it, if any does.
    """

    id: str
    state: DeliveryState
    job_name: str | None
    server_url: str | None
    target_url: str
    attempts: int
    created_at: datetime
    last_attempted_at: datetime | None
    held_reason: HoldReason | None
    held_at: datetime | None
    held_until: datetime | None
    settled_at: datetime | None
    error_code: str | None
    last_error: str | None
    ordering_key: str | None
    series: int
    activity_id: str | None
    actor: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """One attempt as `delivery_attempts` has it.

    `code` is None if it delivered, `remote_code` is what the server said, `note` is what neither of these tells.
    """

    started_at: datetime
    series: int | None
    attempt: int
    outcome: str
    code: str | None
    remote_code: str | None
    http_status: int | None
    duration_ms: int
    relayed_by: str | None
    note: AttemptNote | None

    @property
    def ended(self) -> str:
        """How it ended, in words."""
        return ended(self.outcome, self.note)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryPage:
    """Part of a list; `after` continues it, None at its end."""

    deliveries: tuple[DeliveryRow, ...]
    after: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCount:
    """How many deliveries to a server are in each state. `server_url` None stands for rows that name no server."""

    server_url: str | None
    ready: int
    held: int
    failed: int
    expired: int
    oldest: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryStats:
    """Where deliveries stand.

    `open` ones are owed, ready or held, and `ages` are theirs. `servers` are those with the most rows, `held_servers`
    is the number of servers with held ones, `codes` says why deliveries failed.
    """

    open: int
    ready: int
    held: int
    failed: int
    expired: int
    oldest_open: datetime | None
    oldest_ready: datetime | None
    oldest_held: datetime | None
    ages: dict[Age, int]
    held_by_reason: dict[HoldReason, int]
    held_servers: int
    codes: dict[str, int]
    servers: tuple[ServerCount, ...]


async def list_deliveries(
    database: Database, selection: Selection, *, limit: int = 50, after: str | None = None
) -> DeliveryPage:
    """Return up to *limit* of the selected deliveries in the order of their ids, from where the page before ended."""
    query = delivery_rows().where(*selection.conditions()).order_by(col(DeliveryJob.id)).limit(limit + 1)
    if after is not None:
        query = query.where(col(DeliveryJob.id) > after)
    async with database.read() as session:
        found = [DeliveryRow(**row._mapping) for row in await session.execute(query)]
    return DeliveryPage(deliveries=tuple(found[:limit]), after=found[limit - 1].id if len(found) > limit else None)


async def show(database: Database, delivery_id: str) -> tuple[DeliveryRow, tuple[AttemptRow, ...]] | None:
    """Return the delivery and its last attempts, oldest first, or None if it has no row.

    Then it was delivered, dropped or purged.
    """
    async with database.read() as session:
        row = (await session.execute(delivery_rows().where(col(DeliveryJob.id) == delivery_id))).one_or_none()
        if row is None:
            return None
        delivery = DeliveryRow(**row._mapping)
        # In the order of the unique index: by the time, PostgreSQL may look for them in the attempts of all deliveries.
        latest = (col(DeliveryAttempt.series).desc(), col(DeliveryAttempt.attempt).desc())
        mine = _attempts(col(DeliveryAttempt.delivery_id) == delivery_id).order_by(*latest)
        found = await session.execute(mine.limit(MAX_ATTEMPTS_SHOWN))
        return delivery, tuple(reversed([AttemptRow(**each._mapping) for each in found]))


async def last_attempts(database: Database, server_url: str, *, limit: int = 5) -> Sequence[AttemptRow]:
    """Return the last attempts at a server, the latest first."""
    latest = (col(DeliveryAttempt.started_at).desc(), col(DeliveryAttempt.id).desc())
    query = _attempts(col(DeliveryAttempt.server_url) == server_url).order_by(*latest).limit(limit)
    async with database.read() as session:
        return [AttemptRow(**row._mapping) for row in await session.execute(query)]


async def count(database: Database, conditions: Sequence[ColumnElement[bool]]) -> int:
    """Count the deliveries that meet all *conditions*."""
    async with database.read() as session:
        query = select(func.count()).select_from(DeliveryJob).where(*conditions)
        return int((await session.execute(query)).scalar_one())


def age() -> ColumnElement[str]:
    """Return the expression for how long ago a delivery was made, by the clock of this process."""
    created, now = col(DeliveryJob.created_at), datetime.now(UTC)
    return case(*((created > now - limit, name.value) for name, limit in _AGES), else_=Age.OLDER.value)


async def stats(database: Database, selection: Selection, *, servers: int = 10) -> DeliveryStats:
    """Count the selected deliveries by state, code, age, and for the *servers* that have the most of them."""
    created = col(DeliveryJob.created_at)
    keys = (col(DeliveryJob.state), col(DeliveryJob.held_reason), col(DeliveryJob.error_code), age())
    groups: Executable = select(*keys, func.count(), func.min(created)).where(*selection.conditions()).group_by(*keys)
    held = select(func.count(distinct(col(DeliveryJob.server_url)))).where(
        *selection.conditions(), is_in(DeliveryState.HELD)
    )
    async with database.read() as session:
        found = summed(await session.execute(groups))
        held_servers = found.held_servers
        if selection.server_url is None and held_servers:  # for one server, SQLite would look through all that is held
            held_servers = (await session.execute(held)).scalar_one()
        by_server = [ServerCount(**row._mapping) for row in await session.execute(_by_server(selection, servers))]
    return replace(found, held_servers=held_servers, servers=tuple(by_server))


async def by_unknown_wires(database: Database, selection: Selection, wires: Collection[str]) -> dict[str, int]:
    """Count those of the selected deliveries that are owed by wires which are none of these: nothing sends them."""
    wire = col(DeliveryJob.wire)
    counts = (
        select(wire, func.count().label("number"))
        .where(*selection.conditions(), is_in(OPEN), wire.not_in(wires))
        .group_by(wire)
        .order_by(wire)
    )
    return {row.wire: row.number for row in await database.rows(counts)}


def summed(groups: Iterable[Group]) -> DeliveryStats:
    """Return where these deliveries stand, as those of one server."""
    counts = dict.fromkeys(DeliveryState, 0)
    oldest = dict[DeliveryState, datetime]()
    ages, reasons, codes = dict.fromkeys(Age, 0), dict[HoldReason, int](), dict[str, int]()
    for state, reason, code, age, number, first in groups:
        counts[state] += number
        oldest[state] = min(first, oldest.get(state, first))
        if state in (DeliveryState.READY, DeliveryState.HELD):
            ages[Age(age)] += number
        if state is DeliveryState.HELD and reason is not None:
            reasons[reason] = reasons.get(reason, 0) + number
        if state is DeliveryState.FAILED:
            codes[code or "?"] = codes.get(code or "?", 0) + number
    oldest_ready, oldest_held = oldest.get(DeliveryState.READY), oldest.get(DeliveryState.HELD)
    return DeliveryStats(
        open=counts[DeliveryState.READY] + counts[DeliveryState.HELD],
        **{state.value: number for state, number in counts.items()},
        oldest_open=min((at for at in (oldest_ready, oldest_held) if at is not None), default=None),
        oldest_ready=oldest_ready,
        oldest_held=oldest_held,
        ages=ages,
        held_by_reason=_most_first(reasons),
        held_servers=min(counts[DeliveryState.HELD], 1),
        codes=_most_first(codes),
        servers=(),
    )


def _most_first(counts: dict[K, int]) -> dict[K, int]:
    return dict(sorted(counts.items(), key=lambda each: -each[1]))


def _by_server(selection: Selection, limit: int) -> Executable:
    server = col(DeliveryJob.server_url)
    states = (func.count().filter(is_in(state)).label(state.value) for state in DeliveryState)
    return (
        select(server, *states, func.min(col(DeliveryJob.created_at)).label("oldest"))
        .where(*selection.conditions())
        .group_by(server)
        .order_by(func.count().desc(), server)
        .limit(limit)
    )


def delivery_rows() -> Select[*tuple[Any, ...]]:
    """Return the query for all deliveries, without their texts, for the caller to narrow down and to bound."""
    is_held = col(DeliveryJob.state) == DeliveryState.HELD
    held_until = case((is_held, col(DeliveryJob.next_attempt_at))).label("held_until")
    names = [column.name for column in fields(DeliveryRow) if column.name not in _OF_TEXT]
    mine = (held_until if name == held_until.name else getattr(DeliveryJob, name) for name in names)
    of_text = (getattr(DeliveryPayload, name) for name in _OF_TEXT)
    joined = col(DeliveryPayload.id) == col(DeliveryJob.payload_id)
    return select(*mine, *of_text).select_from(DeliveryJob).outerjoin(DeliveryPayload, joined)


_OF_TEXT: Final = ("activity_id", "actor")
"""What is the same for all deliveries of a text."""


def _attempts(condition: ColumnElement[bool]) -> Select[*tuple[Any, ...]]:
    return select(
        col(DeliveryAttempt.started_at),
        col(DeliveryAttempt.series),
        col(DeliveryAttempt.attempt),
        col(DeliveryAttempt.outcome),
        col(DeliveryAttempt.error_code).label("code"),
        col(DeliveryAttempt.remote_code),
        col(DeliveryAttempt.http_status),
        col(DeliveryAttempt.duration_ms),
        col(DeliveryAttempt.relayed_by),
        col(DeliveryAttempt.note),
    ).where(condition)


def _is_for(server_url: str) -> ColumnElement[bool]:
    """Return the condition for rows of the server. Rows of Node producers name no server: their target tells it."""
    target = col(DeliveryJob.target_url)
    unnamed = and_(col(DeliveryJob.server_url).is_(None), target.startswith(f"{server_url}/", autoescape=True))
    return or_(col(DeliveryJob.server_url) == server_url, unnamed)
