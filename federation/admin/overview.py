"""How the node does: what the last hour brought, and what is owed.

Reads what was counted ahead of time, some 300 rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import bindparam, func, select
from sqlmodel import col

from db import AttemptMinute, AttemptOutcome, Database, DeliveryJob, DeliveryState, DeliveryTotal, HoldReason
from federation.rollups.attempts import BOUNDS_MS

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
class Owed:
    """How many deliveries are in each state, as of `counted_at`, which is None before the first count.

    `oldest` is when the oldest owed delivery was made, as of now.
    """

    counted_at: datetime | None
    states: Mapping[DeliveryState, int]
    held_by_reason: Mapping[HoldReason, int]
    oldest: datetime | None

    @property
    def owed(self) -> int:
        return self.states[DeliveryState.READY] + self.states[DeliveryState.HELD]


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
    oldest = [
        (await database.rows(_OLDEST, {"state": state}))[0][0] for state in (DeliveryState.READY, DeliveryState.HELD)
    ]
    return Owed(
        counted_at=counted_at,
        states=states,
        held_by_reason=reasons,
        oldest=min((at for at in oldest if at is not None), default=None),
    )


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
_OLDEST: Final = select(func.min(col(DeliveryJob.created_at))).where(col(DeliveryJob.state) == bindparam("state"))
