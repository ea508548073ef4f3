"""Where an activity went that was sent by ActivityPub: its deliveries by state, and what those that are left wait for.

A delivered delivery has no row: that there was one is known by its attempts, as long as these are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final

from sqlalchemy import and_, distinct, exists, func, select
from sqlmodel import col

from db import AttemptOutcome, Database, DeliveryAttempt, DeliveryJob, DeliveryPayload, DeliveryState
from federation.admin.attempts import LoggedAttempt, attempts_at_activity
from federation.admin.deliveries.deliveries import DeliveryRow, Selection, list_deliveries, says
from federation.admin.why import explain
from federation.admin.words import counted, moment

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

DELIVERED: Final = "delivered"
GONE: Final = "gone"
"""The state of deliveries that were tried and have no row, and did not arrive: dropped, or given up and purged."""
MOST_EXPLAINED: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SentActivity:
    """An activity: who signs it, since when it is owed, and how many of its deliveries are in each state.

    `actor` and `sent_at` are None where only its attempts are left. `deliveries` are those that have a row, by id, as
    many as fit into a list, which goes on after `after`.
    """

    activity_id: str
    actor: str | None
    sent_at: datetime | None
    states: Mapping[str, int]
    deliveries: Sequence[DeliveryRow]
    after: str | None
    attempts: Sequence[LoggedAttempt]

    @property
    def arrived(self) -> bool:
        """Whether every delivery did."""
        return self.states.keys() <= {DELIVERED}

    def sentences(self) -> Iterator[str]:
        """Yield the same as sentences for people."""
        by = f" by {self.actor}" if self.actor else ""
        at = f", at {moment(self.sent_at)}" if self.sent_at else ""
        told = ", ".join(f"{number} {state}" for state, number in self.states.items()) or "none is left"
        yield f"It was sent{by}{at}, to {counted(sum(self.states.values()), 'inbox')}: {told}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """An activity, and why what is left of it waits: of the first servers that it is held for, in sentences."""

    activity: SentActivity
    waits: Mapping[str, Sequence[str]]

    def sentences(self) -> Iterator[str]:
        """Yield the same as sentences for people: the state first, then each delivery that has a row, and why."""
        yield from self.activity.sentences()
        for each in self.activity.deliveries:
            reason = f" for {each.held_reason.value}" if each.held_reason else ""
            until = f" until {moment(each.held_until)}" if each.held_until else ""
            code = f", the last attempt ended with {each.error_code}" if each.error_code else ""
            yield f"{each.state.value}{reason}{until}: {each.target_url} ({each.id}){code}."
        if self.activity.after is not None:
            yield f"There are more: `federation deliveries list --activity {self.activity.activity_id}` has all."
        for url, why in self.waits.items():
            yield f"{url}: {' '.join(why)}"


async def whereabouts(federation: Federation, activity_id: str) -> Whereabouts | None:
    """Return where the activity went, or None if nothing here knows it. No server is asked.

    Raises:
        Unreachable: the queue does not answer.
    """
    found = await find(federation.database, activity_id)
    if found is None:
        return None
    held = (each.server_url for each in found.deliveries if each.state is DeliveryState.HELD and each.server_url)
    waits = {}
    for url in [*dict.fromkeys(held)][:MOST_EXPLAINED]:
        told = await explain(federation, url)
        waits[url] = tuple(told.hindrances())
    return Whereabouts(activity=found, waits=waits)


async def find(
    database: Database, activity_id: str, *, limit: int = 50, after: str | None = None
) -> SentActivity | None:
    """Return the activity, with its deliveries from where the page before ended; None if nothing here knows it."""
    attempts = await attempts_at_activity(database, activity_id)
    texts = await database.rows(
        select(col(DeliveryPayload.actor), col(DeliveryPayload.created_at))
        .where(col(DeliveryPayload.activity_id) == activity_id)
        .order_by(col(DeliveryPayload.created_at))
        .limit(1)
    )
    if not attempts and not texts:
        return None
    page = await list_deliveries(database, Selection(activity_id=activity_id), limit=limit, after=after)
    return SentActivity(
        activity_id=activity_id,
        actor=texts[0].actor if texts else None,
        sent_at=texts[0].created_at if texts else None,
        states=await _states(database, activity_id),
        deliveries=page.deliveries,
        after=page.after,
        attempts=attempts,
    )


async def _states(database: Database, activity_id: str) -> dict[str, int]:
    """Count the activity's deliveries; states with none are left out."""
    tried, state = col(DeliveryAttempt.delivery_id), col(DeliveryJob.state)
    has_row = exists().where(col(DeliveryJob.id) == tried)
    without = select(
        func.count(distinct(tried)).label("tried"),
        func.count(distinct(tried)).filter(col(DeliveryAttempt.outcome) == AttemptOutcome.DELIVERED).label(DELIVERED),
    ).where(and_(col(DeliveryAttempt.activity_id) == activity_id, ~has_row))
    rows = select(state, func.count().label("number")).where(says(activity_id)).group_by(state)
    numbers = {row.state: row.number for row in await database.rows(rows)}
    [ended] = await database.rows(without)
    counts = {
        DELIVERED: ended.delivered,
        **{each.value: numbers.get(each, 0) for each in DeliveryState},
        GONE: ended.tried - ended.delivered,
    }
    return {name: number for name, number in counts.items() if number}
