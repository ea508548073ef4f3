"""What an administrator sees of deliveries: which are owed, which failed, why, and where they pile up.

A delivered delivery has no row. `OPEN` ones are owed; `FAILED` ones are settled and kept for a week.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final

from sqlalchemy import ColumnElement, Executable, Select, and_, case, func, or_, select
from sqlmodel import col

from db import Database, DeliveryAttempt, DeliveryJob

MAX_ATTEMPTS_SHOWN: Final = 50


class DeliveryState(StrEnum):
    """What a row in `delivery_jobs` stands for."""

    OPEN = "open"
    FAILED = "failed"


class Age(StrEnum):
    """How long a delivery has been owed."""

    MINUTE = "under a minute"
    HOUR = "under an hour"
    DAY = "under a day"
    OLDER = "a day and more"


_AGES: Final = ((Age.MINUTE, timedelta(minutes=1)), (Age.HOUR, timedelta(hours=1)), (Age.DAY, timedelta(days=1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which deliveries are meant: those that meet everything that is set. `code` is that of a failure, so only failed
    deliveries have one; `older_than` counts from when the delivery was made.
    """

    server_url: str | None = None
    state: DeliveryState | None = None
    code: str | None = None
    older_than: timedelta | None = None
    ids: tuple[str, ...] = ()

    @property
    def is_everything(self) -> bool:
        return self == Selection()

    def conditions(self) -> list[ColumnElement[bool]]:
        """As SQL."""
        conditions: list[ColumnElement[bool]] = []
        if self.ids:
            conditions.append(col(DeliveryJob.id).in_(self.ids))
        if self.server_url is not None:
            conditions.append(_is_for(self.server_url))
        if self.state is DeliveryState.OPEN:
            conditions.append(col(DeliveryJob.settled_at).is_(None))
        elif self.state is DeliveryState.FAILED:
            conditions.append(col(DeliveryJob.settled_at).is_not(None))
        if self.code is not None:
            conditions.append(col(DeliveryJob.error_code) == self.code)
        if self.older_than is not None:
            conditions.append(col(DeliveryJob.created_at) < datetime.now(UTC) - self.older_than)
        return conditions


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryRow:
    """One delivery without its text."""

    id: str
    job_name: str | None
    server_url: str | None
    target_url: str
    attempts: int
    created_at: datetime
    last_attempted_at: datetime | None
    settled_at: datetime | None
    error_code: str | None
    last_error: str | None

    @property
    def state(self) -> DeliveryState:
        return DeliveryState.OPEN if self.settled_at is None else DeliveryState.FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """One attempt as `delivery_attempts` has it; `code` is None if it delivered."""

    started_at: datetime
    attempt: int
    outcome: str
    code: str | None
    http_status: int | None
    duration_ms: int
    relayed_by: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryPage:
    """Part of a list; `after` continues it, None at its end."""

    deliveries: tuple[DeliveryRow, ...]
    after: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCount:
    """How many deliveries a server is owed, and how many to it failed; None: rows that name no server."""

    server_url: str | None
    open: int
    failed: int
    oldest: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryStats:
    """Where deliveries stand. `servers` are those with the most rows, `codes` why deliveries failed."""

    open: int
    failed: int
    oldest_open: datetime | None
    ages: dict[Age, int]
    codes: dict[str, int]
    servers: tuple[ServerCount, ...]


async def list_deliveries(
    database: Database, selection: Selection, *, limit: int = 50, after: str | None = None
) -> DeliveryPage:
    """Up to *limit* of the selected deliveries in the order of their ids, from where the page before ended."""
    query = _rows().where(*selection.conditions()).order_by(col(DeliveryJob.id)).limit(limit + 1)
    if after is not None:
        query = query.where(col(DeliveryJob.id) > after)
    async with database.read() as session:
        found = [DeliveryRow(**row._mapping) for row in await session.execute(query)]
    return DeliveryPage(deliveries=tuple(found[:limit]), after=found[limit - 1].id if len(found) > limit else None)


async def show(database: Database, delivery_id: str) -> tuple[DeliveryRow, tuple[AttemptRow, ...]] | None:
    """The delivery and its last attempts, oldest first; None if there is no such row: delivered, dropped or purged."""
    async with database.read() as session:
        row = (await session.execute(_rows().where(col(DeliveryJob.id) == delivery_id))).one_or_none()
        if row is None:
            return None
        delivery = DeliveryRow(**row._mapping)
        # By the server, which is indexed together with the time; by the delivery alone it would be a scan.
        mine = [col(DeliveryAttempt.delivery_id) == delivery_id]
        if delivery.server_url is not None:
            mine.append(col(DeliveryAttempt.server_url) == delivery.server_url)
        found = await session.execute(_attempts(*mine, limit=MAX_ATTEMPTS_SHOWN))
        return delivery, tuple(reversed([AttemptRow(**each._mapping) for each in found]))


async def last_attempts(database: Database, server_url: str, *, limit: int = 5) -> Sequence[AttemptRow]:
    """The last attempts at a server, the latest first."""
    query = _attempts(col(DeliveryAttempt.server_url) == server_url, limit=limit)
    async with database.read() as session:
        return [AttemptRow(**row._mapping) for row in await session.execute(query)]


async def count(database: Database, conditions: Sequence[ColumnElement[bool]]) -> int:
    """How many deliveries meet all *conditions*."""
    async with database.read() as session:
        query = select(func.count()).select_from(DeliveryJob).where(*conditions)
        return int((await session.execute(query)).scalar_one())


async def stats(database: Database, selection: Selection, *, servers: int = 10) -> DeliveryStats:
    """The selected deliveries, counted by state, code, age, and for the *servers* that have the most of them."""
    now = datetime.now(UTC)
    is_open = col(DeliveryJob.settled_at).is_(None)
    created = col(DeliveryJob.created_at)
    age = case(*((created > now - limit, name.value) for name, limit in _AGES), else_=Age.OLDER.value)
    groups = (
        select(is_open.label("open"), col(DeliveryJob.error_code), age.label("age"), func.count(), func.min(created))
        .where(*selection.conditions())
        .group_by(is_open, col(DeliveryJob.error_code), age)
    )
    open_ = failed = 0
    oldest: datetime | None = None
    ages, codes = dict.fromkeys(Age, 0), dict[str, int]()
    async with database.read() as session:
        for group_open, code, group_age, number, first in await session.execute(groups):
            if group_open:
                open_ += number
                ages[Age(group_age)] += number
                oldest = first if oldest is None else min(oldest, first)
            else:
                failed += number
                codes[code or "?"] = codes.get(code or "?", 0) + number
        by_server = [ServerCount(**row._mapping) for row in await session.execute(_by_server(selection, servers))]
    return DeliveryStats(
        open=open_,
        failed=failed,
        oldest_open=oldest,
        ages=ages,
        codes=dict(sorted(codes.items(), key=lambda each: -each[1])),
        servers=tuple(by_server),
    )


def _by_server(selection: Selection, limit: int) -> Executable:
    open_ = func.count().filter(col(DeliveryJob.settled_at).is_(None))
    failed = func.count().filter(col(DeliveryJob.settled_at).is_not(None))
    server = col(DeliveryJob.server_url)
    oldest = func.min(col(DeliveryJob.created_at))
    return (
        select(server, open_.label("open"), failed.label("failed"), oldest.label("oldest"))
        .where(*selection.conditions())
        .group_by(server)
        .order_by(func.count().desc(), server)
        .limit(limit)
    )


def _rows() -> Select[tuple[object, ...]]:
    return select(*(getattr(DeliveryJob, column.name) for column in fields(DeliveryRow)))


def _attempts(*conditions: ColumnElement[bool], limit: int) -> Executable:
    """The latest first."""
    return (
        select(
            col(DeliveryAttempt.started_at),
            col(DeliveryAttempt.attempt),
            col(DeliveryAttempt.outcome),
            col(DeliveryAttempt.error_code).label("code"),
            col(DeliveryAttempt.http_status),
            col(DeliveryAttempt.duration_ms),
            col(DeliveryAttempt.relayed_by),
        )
        .where(*conditions)
        .order_by(col(DeliveryAttempt.started_at).desc(), col(DeliveryAttempt.id).desc())
        .limit(limit)
    )


def _is_for(server_url: str) -> ColumnElement[bool]:
    """Rows of Node producers name no server: their target tells."""
    target = col(DeliveryJob.target_url)
    unnamed = and_(col(DeliveryJob.server_url).is_(None), target.startswith(f"{server_url}/", autoescape=True))
    return or_(col(DeliveryJob.server_url) == server_url, unnamed)
