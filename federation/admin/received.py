"""What an administrator sees and does of activities that others sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final

from sqlalchemy import select
from sqlmodel import col

from db import ReceivedActivity, ReceivedState
from federation.activitypub.calls import parts_of
from federation.base.audit import Order, recorded

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

OPEN: Final = (ReceivedState.NEW, ReceivedState.FAILED)
"""What is not done."""


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
