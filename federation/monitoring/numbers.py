"""What the database says about the whole node, in one bounded look."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import ColumnElement, FromClause, Subquery, Text, and_, case, func, or_, select, type_coerce
from sqlalchemy.ext.asyncio import AsyncSession
from sqlmodel import col

from db import (
    ActivityInbox,
    BlacklistedServer,
    Database,
    DeliveryJob,
    DeliveryState,
    HoldReason,
    LinkState,
    ReceivedActivity,
    ReceivedState,
    RunOutcome,
    SchedulerJob,
    Server,
    ServerLink,
)

MAX_ROWS: Final = 20_000
"""How many of the oldest ready, and of the oldest held deliveries are read, by their indexes."""
JOBLESS_AFTER: Final = timedelta(minutes=2)
"""Longer than a short outage of a queue and a sweep: a delivery without a job after that needs attention."""
ON_HOLD: Final = "on_hold"
"""The state of links that an operator holds, whatever their other state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedNumbers:
    """Activities that others sent, and that are not done; since when the oldest waits that is to be handled."""

    waiting: int
    failed: int
    oldest: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseNumbers:
    """Counts over all processes of the node.

    Deliveries are those that this application's producers owe; `successes` are the recurring jobs whose last run
    succeeded, and when. `oldest_ready` is since when the delivery that has been ready longest is so: since it was made,
    or released. `oldest_held` is when the oldest held delivery was made, and `oldest_while_up` when the oldest owed one
    to a server whose link is up was made.
    """

    healthy: int
    unhealthy: int
    links: Mapping[str, int]
    blacklist_rules: int
    inboxes_gone: int
    received: ReceivedNumbers
    ready: int
    held: Mapping[HoldReason, int]
    oldest_ready: datetime | None
    oldest_held: datetime | None
    oldest_while_up: datetime | None
    without_job: int
    successes: Mapping[str, datetime]

    @property
    def owed(self) -> int:
        return self.ready + sum(self.held.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadyRows:
    count: int
    longest: datetime | None
    oldest_while_up: datetime | None
    without_job: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    by_reason: Mapping[HoldReason, int]
    oldest: datetime | None
    oldest_while_up: datetime | None


def age(since: datetime | None, now: datetime) -> float:
    """Return the age in seconds, or 0 if there is nothing that has one."""
    return 0.0 if since is None else max((now - since).total_seconds(), 0.0)


async def read_numbers(database: Database, *, recurring: Collection[str]) -> DatabaseNumbers:
    """Return the numbers as they are now; `recurring` names the jobs that this process knows to recur.

    The row of a job that no longer recurs stays as it was, and is ignored.

    Raises:
        SQLAlchemyError: the database did not answer.
    """
    now = datetime.now(UTC)
    async with database.read() as session:
        health = select(col(Server.is_healthy), func.count()).group_by(col(Server.is_healthy))
        servers = {bool(healthy): int(count) for healthy, count in await session.execute(health)}
        end = col(BlacklistedServer.expires_at)
        in_force = select(func.count()).select_from(BlacklistedServer).where(or_(end.is_(None), end > now))
        rules = (await session.execute(in_force)).scalar_one()
        is_held = col(ServerLink.operator_hold).is_(True)
        state = case((is_held, ON_HOLD), else_=type_coerce(col(ServerLink.state), Text))
        gone = select(func.count()).where(col(ActivityInbox.gone_at).is_not(None))
        inboxes_gone = (await session.execute(gone)).scalar_one()
        links = await session.execute(select(state, func.count()).group_by(state))
        by_state = dict.fromkeys((*(each.value for each in LinkState), ON_HOLD), 0) | {row[0]: row[1] for row in links}
        received = await received_numbers(session)
        ready, held = await _ready(session, now), await _held(session)
        done = select(col(SchedulerJob.name), col(SchedulerJob.finished_at)).where(
            col(SchedulerJob.outcome) == RunOutcome.DONE, col(SchedulerJob.name).in_(recurring)
        )
        successes = {name: at for name, at in await session.execute(done) if at is not None}
    return DatabaseNumbers(
        healthy=servers.get(True, 0),
        unhealthy=servers.get(False, 0),
        links=by_state,
        blacklist_rules=rules,
        inboxes_gone=inboxes_gone,
        received=received,
        ready=ready.count,
        held=held.by_reason,
        oldest_ready=ready.longest,
        oldest_held=held.oldest,
        oldest_while_up=min(
            (at for at in (ready.oldest_while_up, held.oldest_while_up) if at is not None), default=None
        ),
        without_job=ready.without_job,
        successes=successes,
    )


async def received_numbers(session: AsyncSession) -> ReceivedNumbers:
    """Return how many activities of others are not done, `MAX_ROWS` of each kind at most."""
    waiting, failed = (
        select(col(ReceivedActivity.received_at)).where(col(ReceivedActivity.state) == state).limit(MAX_ROWS).subquery()
        for state in (ReceivedState.NEW, ReceivedState.FAILED)
    )
    how_many_failed = select(func.count()).select_from(failed).scalar_subquery()
    query = select(func.count(), func.min(waiting.c.received_at), how_many_failed).select_from(waiting)
    number, oldest, gone_wrong = (await session.execute(query)).one()
    return ReceivedNumbers(waiting=number, failed=gone_wrong, oldest=oldest)


async def _ready(session: AsyncSession, now: datetime) -> _ReadyRows:
    names = ("server_url", "wire", "created_at", "queued_at", "last_attempted_at", "released_at")
    # The original implementation never closed the rows of failed deliveries: those would be the oldest for ever.
    ours = (
        _STATE == DeliveryState.READY,
        col(DeliveryJob.settled_at).is_(None),
        col(DeliveryJob.job_name).is_not(None),
    )
    oldest = _oldest(*names, where=ours)
    row = oldest.c
    jobless = row.queued_at.is_(None) & row.last_attempted_at.is_(None) & (row.created_at < now - JOBLESS_AFTER)
    since = func.min(func.coalesce(row.released_at, row.created_at))
    while_up = func.min(row.created_at).filter(_IS_UP)
    query = select(func.count(), since, while_up, func.count().filter(jobless)).select_from(_with_links(oldest))
    count, longest, oldest_while_up, without_job = (await session.execute(query)).one()
    return _ReadyRows(count=count, longest=longest, oldest_while_up=oldest_while_up, without_job=without_job)


async def _held(session: AsyncSession) -> _Held:
    oldest = _oldest("server_url", "wire", "created_at", "held_reason", where=(_STATE == DeliveryState.HELD,))
    row = oldest.c
    while_up = func.min(row.created_at).filter(_IS_UP)
    by_reason = select(row.held_reason, func.count(), func.min(row.created_at), while_up).group_by(row.held_reason)
    query = by_reason.select_from(_with_links(oldest))
    found = (await session.execute(query)).all()
    counts = dict.fromkeys(HoldReason, 0) | {reason: count for reason, count, _, _ in found if reason is not None}
    return _Held(
        by_reason=counts,
        oldest=min((first for _, _, first, _ in found), default=None),
        oldest_while_up=min((first for _, _, _, first in found if first is not None), default=None),
    )


def _oldest(*names: str, where: Sequence[ColumnElement[bool]]) -> Subquery:
    columns = (getattr(DeliveryJob, name) for name in names)
    return select(*columns).where(*where).order_by(col(DeliveryJob.created_at)).limit(MAX_ROWS).subquery()


def _with_links(rows: Subquery) -> FromClause:
    """Join the links that are closed, by the delivery's wire; a server without a link is up.

    As a list in `NOT IN` they would be walked along for each row, once they are too many for PostgreSQL's `work_mem`.
    """
    closed = and_(_CLOSED.c.server_url == rows.c.server_url, _CLOSED.c.wire == rows.c.wire)
    return rows.outerjoin(_CLOSED, closed)


_CLOSED: Final = (
    select(col(ServerLink.server_url), col(ServerLink.wire))
    .where(or_(col(ServerLink.state) != LinkState.UP, col(ServerLink.operator_hold).is_(True)))
    .subquery("closed")
)
_IS_UP: Final = _CLOSED.c.server_url.is_(None)
_STATE: Final = col(DeliveryJob.state)
