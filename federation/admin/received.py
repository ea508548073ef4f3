"""What an administrator sees and does of activities that others sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final

from sqlalchemy import func, select
from sqlmodel import col

from db import Database, ReceivedActivity, ReceivedState
from federation.activitypub.calls import parts_of
from federation.admin.words import counted, moment
from federation.base.audit import Order, recorded
from federation.monitoring.numbers import ReceivedNumbers, received_numbers

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

OPEN: Final = (ReceivedState.NEW, ReceivedState.FAILED)
"""What is not done."""
MOST_NAMED: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedRow:
    """An activity that somebody sent, without its text. `last_error` is what a handler raised last."""

    number: int
    activity_id: str | None
    type: str
    actor: str
    state: ReceivedState
    attempts: int
    received_at: datetime
    last_error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedList:
    """Part of a list; `after` continues it, None at its end."""

    activities: Sequence[ReceivedRow]
    after: int | None


async def list_received(
    federation: Federation,
    *,
    limit: int,
    states: Sequence[ReceivedState] = OPEN,
    actor: str | None = None,
    after: int | None = None,
) -> ReceivedList:
    """Return activities in these states, the oldest first, of one actor if it is given.

    Raises:
        ConfigurationError: this node has no ActivityPub.
    """
    parts_of(federation)
    query = select(*_COLUMNS).where(col(ReceivedActivity.state).in_(states))
    if actor is not None:
        query = query.where(col(ReceivedActivity.actor) == actor)
    if after is not None:
        query = query.where(col(ReceivedActivity.number) > after)
    rows = await federation.database.rows(query.order_by(col(ReceivedActivity.number)).limit(limit + 1))
    found = [ReceivedRow(**row._mapping) for row in rows[:limit]]
    return ReceivedList(activities=found, after=found[-1].number if len(rows) > limit else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArrival:
    """An activity, and the number of the one of the same actor that it waits for, if it does."""

    activity: ReceivedRow
    behind: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """What came with one id: of several actors, or of one who names several activities alike, the latest first."""

    received: Sequence[StoredArrival]

    @property
    def are_done(self) -> bool:
        """Whether all were handled."""
        return all(each.activity.state is ReceivedState.DONE for each in self.received)

    def sentences(self) -> Iterator[str]:
        """Yield the same as sentences for people."""
        for each in self.received:
            row = each.activity
            yield f"{row.type} that {row.actor} sent; it arrived at {moment(row.received_at)}: {_told(each)}."


async def arrivals(database: Database, activity_id: str) -> Arrivals | None:
    """Return what others sent with this id, the last few; None if nobody did."""
    number = col(ReceivedActivity.number)
    named = select(*_COLUMNS).where(col(ReceivedActivity.activity_id) == activity_id)
    rows = await database.rows(named.order_by(number.desc()).limit(MOST_NAMED))
    found = [ReceivedRow(**row._mapping) for row in rows]
    told = [StoredArrival(activity=each, behind=await _behind(database, each)) for each in found]
    return Arrivals(received=told) if told else None


async def _behind(database: Database, row: ReceivedRow) -> int | None:
    if row.state is not ReceivedState.NEW:
        return None
    number = col(ReceivedActivity.number)
    before = select(func.min(number)).where(
        col(ReceivedActivity.state) == ReceivedState.NEW, col(ReceivedActivity.actor) == row.actor, number < row.number
    )
    found: int | None = (await database.rows(before))[0][0]
    return found


def _told(arrival: StoredArrival) -> str:
    row = arrival.activity
    if row.state is ReceivedState.DONE:
        return "it was handled"
    if row.state is ReceivedState.FAILED:
        again = f"`federation activitypub received retry {row.number}` has it handled again"
        return f"it could not be handled, tried {counted(row.attempts, 'time')}: {row.last_error}; {again}"
    if arrival.behind is not None:
        return f"it waits for number {arrival.behind}, which its actor sent before"
    if row.attempts:
        return f"it was tried {counted(row.attempts, 'time')}, and will be again: {row.last_error}"
    return "it is to be handled by a process that works on tasks"


async def backlog(federation: Federation) -> ReceivedNumbers:
    """Count what is not done."""
    async with federation.database.read() as session:
        return await received_numbers(session)


async def retry(federation: Federation, numbers: Sequence[int] | None, *, order: Order | None = None) -> int:
    """Have activities that failed handled again: those with these numbers, or all. Return how many there were.

    Raises:
        ConfigurationError: this node has no ActivityPub.
    """
    parts_of(federation)
    assert federation.activitypub is not None
    async with recorded(federation.database, order) as record:
        return await federation.activitypub.received.retry(numbers, record=record)


_COLUMNS: Final = tuple(
    getattr(ReceivedActivity, name)
    for name in ("number", "activity_id", "type", "actor", "state", "attempts", "received_at", "last_error")
)
