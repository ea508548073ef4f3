"""What an administrator sees and does of activities that others sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final

from sqlalchemy import func, select
from sqlalchemy.orm import aliased
from sqlmodel import col

from db import Database, ReceivedActivity, ReceivedState
from federation.activitypub.calls import parts_of
from federation.admin.words import counted, moment
from federation.base.audit import Order, recorded
from federation.base.settings.reach import connect
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
        again = f"`federation activitypub received retry {row.number}` has it tried now"
        return f"it was tried {counted(row.attempts, 'time')}, and will be again: {row.last_error}; {again}"
    return "it is to be handled by a process that works on tasks"


async def backlog(federation: Federation) -> ReceivedNumbers:
    """Count what is not done."""
    async with federation.database.read() as session:
        return await received_numbers(session)


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedAgain:
    """How many are handled again that had failed, and how many now that waited for their next attempt.

    `behind` has those that were named and wait for an older one of their actor, which has to be over first.
    """

    retried: int
    hurried: int
    behind: Mapping[int, int]

    def sentences(self) -> Iterator[str]:
        """Yield the same as sentences for people."""
        if self.retried or not self.hurried:
            yield f"{self.retried} to be handled again"
        if self.hurried:
            yield f"{self.hurried} to be tried now that waited for the next attempt"
        for number, first in self.behind.items():
            yield f"{number} waits for {first}, which its actor sent before"


async def retry(federation: Federation, numbers: Sequence[int] | None, *, order: Order | None = None) -> TriedAgain:
    """Have activities handled again that failed, and now what waits for its next attempt: of these numbers, or all.

    Raises:
        ConfigurationError: this node has no ActivityPub.
        Unreachable: something waits, and the queue does not answer. Nothing was done.
    """
    parts_of(federation)
    assert federation.activitypub is not None
    behind = await _waiting(federation.database, numbers)
    if behind:
        await connect(federation.tasks_queue)
    async with recorded(federation.database, order) as record:
        hurried = await federation.activitypub.received.hurry(numbers, record=record)
        retried = await federation.activitypub.received.retry(numbers, record=record)
    named = {} if numbers is None else {number: first for number, first in behind.items() if first is not None}
    return TriedAgain(retried=retried, hurried=hurried, behind=named)


async def _waiting(database: Database, numbers: Sequence[int] | None) -> Mapping[int, int | None]:
    """Return those of the numbers that are new, each with the one that it waits for; of all of them the first alone."""
    older = aliased(ReceivedActivity)
    first = (
        select(func.min(col(older.number)))
        .where(
            col(older.state) == ReceivedState.NEW,
            col(older.actor) == col(ReceivedActivity.actor),
            col(older.number) < col(ReceivedActivity.number),
        )
        .scalar_subquery()
    )
    new = select(col(ReceivedActivity.number), first.label("first")).order_by(col(ReceivedActivity.number))
    new = new.where(col(ReceivedActivity.state) == ReceivedState.NEW)
    new = new.limit(1) if numbers is None else new.where(col(ReceivedActivity.number).in_(numbers))
    return {row.number: row.first for row in await database.rows(new)}


_COLUMNS: Final = tuple(
    getattr(ReceivedActivity, name)
    for name in ("number", "activity_id", "type", "actor", "state", "attempts", "received_at", "last_error")
)
