"""What the engine learns of one attempt, and what becomes of the delivery if it failed: a pure decision.

It is made by the class of the failure and the link.

The pauses here are those of held deliveries. Between the attempts of a series its job waits: `delivery_backoff` of
`base/queues/queue.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from db import DeliveryState, HoldReason
from federation.base.queues.job_data import FederationDeliveryJob
from federation.delivery.error_codes import FailureClass
from federation.delivery.errors import PermanentFailure, RetryableFailure
from federation.delivery.ledger.entries import Series
from federation.delivery.wire import Sending, Trace, Wire, code_of
from federation.servers.link_rules import Link, answers


@dataclass(slots=True)
class Report:
    """What the engine has learned of one attempt so far.

    `started_at` and `started` say when it began, by the wall clock and by the loop's clock; `attempt` is its number in
    its job. `link` is what was known of the server when `checked`, by the loop's clock. `begun`: the attempt may go on,
    and belongs to `series` if there is a row; then `payload` is its text. `first_byte`: how long the server may take to
    begin its answer. `seen` is the wire's.
    """

    delivery: FederationDeliveryJob
    wire: Wire
    started_at: datetime
    started: float
    attempt: int = 1
    payload: str = field(default="", repr=False)
    link: Link | None = None
    checked: float = 0.0
    begun: bool = False
    series: Series | None = None
    first_byte: timedelta | None = None
    seen: Trace = field(default_factory=Trace)

    @property
    def is_repeat(self) -> bool:
        """Whether an attempt at the delivery was made before, so that the server may have the activity."""
        return self.attempt > 1 or (self.series is not None and self.series.attempts > 1)

    def sending(self, job_name: str, refuse_blacklisted: Callable[[FederationDeliveryJob], Awaitable[None]]) -> Sending:
        """Return what the wire is to send now."""
        delivery = self.delivery
        assert self.link is not None  # it was looked at before the attempt began
        return Sending(
            job_name=job_name,
            delivery_id=delivery.delivery_job_id,
            server_url=delivery.server_url,
            target_url=delivery.target_url,
            payload=self.payload,
            started_at=self.started_at,
            link=self.link,
            is_repeat=self.is_repeat,
            first_byte=self.first_byte,
            seen=self.seen,
            refuse_blacklisted=partial(refuse_blacklisted, delivery),
        )

    def class_of(self, failure: PermanentFailure | RetryableFailure) -> FailureClass:
        """Return the class that the failure names, or that its code has."""
        if failure.failure_class is not None:
            return failure.failure_class
        told = code_of(self.wire, failure.code)
        return FailureClass.OURS if told is None else told.failure_class


ALONE_PAUSES: Final = (timedelta(minutes=10), timedelta(hours=1), timedelta(hours=6))
"""How long a delivery waits that its server alone does not take, each time. One more time, and it is refused."""
DOUBT_PAUSES: Final = (timedelta(minutes=15), timedelta(hours=2), timedelta(hours=12))
"""How long a delivery waits that is refused for what may be a fault of ours, each time. One more time, and it is
refused."""
FIRST_OWN_PAUSE: Final = timedelta(minutes=1)
LONGEST_OWN_PAUSE: Final = timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """The state that the row gets. In `ready` the same job tries again.

    `uses_pause`: the wait is one of a few that a delivery gets, and counts.
    """

    state: DeliveryState
    reason: HoldReason | None = None
    until: datetime | None = None
    uses_pause: bool = False


AGAIN: Final = Fate(state=DeliveryState.READY)
FAILED: Final = Fate(state=DeliveryState.FAILED)
HELD_FOR_SERVER: Final = Fate(state=DeliveryState.HELD, reason=HoldReason.SERVER)


def fate_of(kind: FailureClass, *, is_last: bool, series: Series, link: Link, now: datetime) -> Fate:
    """Decide what becomes of the row.

    `link` is the link after the failure; `is_last` says that the job has no attempt left.
    """
    if kind is FailureClass.REST and link.is_open:
        return Fate(state=DeliveryState.HELD, reason=HoldReason.REST, until=link.rest_until)
    if kind is FailureClass.REST:  # of a canary: the next look may send it again
        return HELD_FOR_SERVER
    if kind is FailureClass.UNAVAILABLE and (series.is_canary or not link.is_open):
        return HELD_FOR_SERVER
    if not is_last:
        # A refused canary has had its turn; the rest of its attempts comes with the next ones.
        waits = kind is FailureClass.REJECTED and series.is_canary and not link.is_open
        return HELD_FOR_SERVER if waits else AGAIN
    if kind is FailureClass.UNAVAILABLE:
        return HELD_FOR_SERVER
    if kind is FailureClass.OURS:
        return ours(series, now)
    return FAILED if link.is_open or series.is_canary else HELD_FOR_SERVER


def fails_alone(code: str, series: Series, link: Link, *, is_last: bool) -> bool:
    """Tell whether the delivery itself is in trouble, and not its server, which took another one meanwhile.

    That is since it failed as canary, or, if it has used up its attempts, since the first of them. A failure in which
    nothing answered is always the server's, whichever delivery meets it.
    """
    if not answers(code) or series.is_canary or not link.is_open or link.last_success_at is None:
        return False
    since_canary = series.canary_at is not None and link.last_success_at > series.canary_at
    return since_canary or (is_last and link.last_success_at >= series.first_attempted_at)


def alone(series: Series, now: datetime) -> Fate:
    """Decide what becomes of a delivery that alone has used up a series of attempts: a later try, or none."""
    if series.alone >= len(ALONE_PAUSES):
        return FAILED
    until = now + ALONE_PAUSES[series.alone]
    return Fate(state=DeliveryState.HELD, reason=HoldReason.ALONE, until=until, uses_pause=True)


def doubted(series: Series, now: datetime) -> Fate:
    """Decide what becomes of a delivery that is refused, perhaps by a fault of ours: a later try, or none."""
    if series.alone >= len(DOUBT_PAUSES):
        return FAILED
    until = now + DOUBT_PAUSES[series.alone]
    return Fate(state=DeliveryState.HELD, reason=HoldReason.OURS, until=until, uses_pause=True)


def waits_by_itself(
    kind: FailureClass, series: Series, now: datetime, *, tried_later: bool, is_last: bool
) -> Fate | None:
    """Decide what becomes of a refused delivery that waits by itself, whatever its link; None if it does not.

    `tried_later`: it gets a few more series of attempts, as the wire says. What is refused by a fault of ours waits at
    once: its other attempts would meet the same.
    """
    if kind is FailureClass.OURS:
        return doubted(series, now) if tried_later else ours(series, now)
    return alone(series, now) if tried_later and is_last else None


def ours(series: Series, now: datetime) -> Fate:
    """Decide what becomes of a delivery that this node could not send by a fault of its own."""
    return Fate(state=DeliveryState.HELD, reason=HoldReason.OURS, until=now + own_pause(series.holds))


def own_pause(holds: int) -> timedelta:
    """Return how long a fault of ours holds a delivery that it has held `holds` times in a row.

    The times are 1, 2, 4 ... 60 minutes.
    """
    return min(FIRST_OWN_PAUSE * (1 << min(holds, 20)), LONGEST_OWN_PAUSE)
