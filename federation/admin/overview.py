"""How the node does: what the last hour brought, and what is owed.

Reads what was counted ahead of time, some 300 rows. Where nothing has counted for a while, because nothing that
delivers runs, it looks at up to 200 deliveries of each state itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import Select, bindparam, func, select, union_all
from sqlmodel import col

from db import AttemptMinute, AttemptOutcome, Database, DeliveryJob, DeliveryState, DeliveryTotal, HoldReason
from federation.rollups.attempts import BOUNDS_MS
from federation.rollups.job import INTERVAL

OLD: Final = 2 * INTERVAL
"""A count that is older is not believed by itself: the job `rollups` does not run, or takes long."""
MOST_LOOKED_AT: Final = 200
HOUR: Final = timedelta(hours=1)
MINUTE: Final = timedelta(minutes=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MinuteCount:
    """The attempts that began in one minute, by how they ended."""

    at: datetime
    attempts: Mapping[AttemptOutcome, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LastHour:
    """The attempts of the last hour: minutes from the oldest on, without gaps; those under way are not in it.

    `p50_ms` and `p95_ms` are of attempts that delivered, None if there were none. They are interpolated between the
    bounds of the counts, and lie within a third of the true values.
    """

    minutes: tuple[MinuteCount, ...]
    attempts: Mapping[AttemptOutcome, int]
    p50_ms: float | None
    p95_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How many deliveries are in each state, as of `counted_at`, which is None before the first count.

    Of the states in `more` there are at least these, as of now: too many to be counted by whoever looks.
    """

    counted_at: datetime | None
    states: Mapping[DeliveryState, int]
    held_by_reason: Mapping[HoldReason, int]
    more: frozenset[DeliveryState] = frozenset()

    @property
    def is_old(self) -> bool:
        """Whether they are no news: a count is long ago, or there was none."""
        return is_old(self.counted_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owed(Counts):
    """Deliveries by state. `oldest` is when the oldest owed delivery was made, as of now."""

    oldest: datetime | None

    @property
    def owed(self) -> int:
        return self.states[DeliveryState.READY] + self.states[DeliveryState.HELD]


def is_old(counted_at: datetime | None) -> bool:
    """Tell whether nothing has counted for a while, or ever."""
    return counted_at is None or datetime.now(UTC) - counted_at > OLD


async def counted_at(database: Database) -> datetime | None:
    """Return when deliveries, and just before them servers, were counted last; None if they never were."""
    at: datetime | None = (await database.rows(_COUNTED_AT))[0][0]
    return at


async def last_hour(database: Database, *, now: datetime | None = None) -> LastHour:
    """Return the rates and latencies of the last hour."""
    now = now or datetime.now(UTC)
    first = (now - HOUR).replace(second=0, microsecond=0) + MINUTE
    rows = await database.rows(_MINUTES, {"first": first, "last": now})
    by_minute: dict[datetime, dict[AttemptOutcome, int]] = {
        first + MINUTE * number: dict.fromkeys(AttemptOutcome, 0) for number in range(60)
    }
    latencies = [0] * (len(BOUNDS_MS) + 1)
    for row in rows:
        if row.minute in by_minute:
            by_minute[row.minute][row.outcome] = row.attempts
        if row.outcome is AttemptOutcome.DELIVERED and len(row.latencies) == len(latencies):
            latencies = [one + other for one, other in zip(latencies, row.latencies, strict=True)]
    return LastHour(
        minutes=tuple(MinuteCount(at=at, attempts=counts) for at, counts in by_minute.items()),
        attempts={outcome: sum(counts[outcome] for counts in by_minute.values()) for outcome in AttemptOutcome},
        p50_ms=quantile(latencies, 0.5),
        p95_ms=quantile(latencies, 0.95),
    )


async def owed(database: Database) -> Owed:
    """Return how many deliveries are owed, held and given up."""
    states, reasons = dict.fromkeys(DeliveryState, 0), dict[HoldReason, int]()
    counted_at: datetime | None = None
    for row in await database.rows(_TOTALS):
        counted_at = row.counted_at
        states[row.state] += row.deliveries
        if row.held_reason:
            reasons[HoldReason(row.held_reason)] = row.deliveries
    last = Counts(counted_at=counted_at, states=states, held_by_reason=reasons)
    now = await brought_up_to_date(database, last)
    oldest = [
        (await database.rows(_OLDEST, {"state": state}))[0][0] for state in (DeliveryState.READY, DeliveryState.HELD)
    ]
    return Owed(
        counted_at=now.counted_at,
        states=now.states,
        held_by_reason=now.held_by_reason,
        more=now.more,
        oldest=min((at for at in oldest if at is not None), default=None),
    )


async def brought_up_to_date(database: Database, last: Counts, *, server_url: str | None = None) -> Counts:
    """Return the last count, of all deliveries or of those to a server; if it is old, with what is seen now.

    Of a state with 200 deliveries or more the number is that of the last count, if that is not less.
    """
    if not last.is_old:
        return last
    now = datetime.now(UTC)
    parts = [_some(state, server_url).subquery(f"some_{state.value}") for state in DeliveryState]
    some = select(union_all(*(select(part) for part in parts)).subquery()).subquery()
    seen, reasons = dict.fromkeys(DeliveryState, 0), dict[HoldReason, int]()
    for state, reason, number in await database.rows(select(*some.c, func.count()).group_by(*some.c)):
        seen[state] += number
        if reason is not None:
            reasons[reason] = number
    full = {state for state, number in seen.items() if number >= MOST_LOOKED_AT}
    kept = {state for state in full if last.states[state] >= seen[state]}
    return Counts(
        counted_at=last.counted_at if kept else now,
        states={state: last.states[state] if state in kept else number for state, number in seen.items()},
        held_by_reason=last.held_by_reason if DeliveryState.HELD in kept else reasons,
        more=frozenset(full - kept),
    )


def _some(state: DeliveryState, server_url: str | None) -> Select[DeliveryState, HoldReason | None]:
    """Return the query for the oldest deliveries in a state, by an index."""
    query = select(col(DeliveryJob.state), col(DeliveryJob.held_reason)).where(col(DeliveryJob.state) == state)
    if server_url is not None:
        query = query.where(col(DeliveryJob.server_url) == server_url)
    return query.order_by(col(DeliveryJob.created_at), col(DeliveryJob.id)).limit(MOST_LOOKED_AT)


def quantile(latencies: Sequence[int], part: float) -> float | None:
    """Return the duration that this part of the attempts does not exceed. Beyond the last bound it is that bound."""
    rank = part * sum(latencies)
    lower, before = 0.0, 0
    for bound, number in zip(BOUNDS_MS, latencies, strict=False):
        if number and before + number >= rank:
            return lower + (bound - lower) * (rank - before) / number
        lower, before = bound, before + number
    return float(BOUNDS_MS[-1]) if latencies[-1] else None


_MINUTES: Final = (
    select(
        col(AttemptMinute.minute), col(AttemptMinute.outcome), col(AttemptMinute.attempts), col(AttemptMinute.latencies)
    )
    .where(col(AttemptMinute.minute) >= bindparam("first"), col(AttemptMinute.minute) <= bindparam("last"))
    .order_by(col(AttemptMinute.minute))
)
_TOTALS: Final = select(
    col(DeliveryTotal.state),
    col(DeliveryTotal.held_reason),
    col(DeliveryTotal.deliveries),
    col(DeliveryTotal.counted_at),
)
_COUNTED_AT: Final = select(func.max(col(DeliveryTotal.counted_at)))
_OLDEST: Final = select(func.min(col(DeliveryJob.created_at))).where(col(DeliveryJob.state) == bindparam("state"))
