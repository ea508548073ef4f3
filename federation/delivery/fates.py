"""What becomes of a delivery whose attempt failed: a pure decision, by the class of the failure and the link."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from db import DeliveryState, HoldReason
from federation.delivery.codes import FailureClass
from federation.delivery.entries import Series
from federation.servers.link_rules import Link, answers

FIRST_OWN_PAUSE: Final = timedelta(minutes=1)
LONGEST_OWN_PAUSE: Final = timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """The state that the row gets. In `ready` the same job tries again."""

    state: DeliveryState
    reason: HoldReason | None = None
    until: datetime | None = None


AGAIN: Final = Fate(state=DeliveryState.READY)
FAILED: Final = Fate(state=DeliveryState.FAILED)
HELD_FOR_SERVER: Final = Fate(state=DeliveryState.HELD, reason=HoldReason.SERVER)


def fate_of(kind: FailureClass, *, is_last: bool, series: Series, link: Link, now: datetime) -> Fate:
    """Decide what becomes of the row.

    `link` is the link after the failure; `is_last` says that the job has no attempt left.
    """
    if kind is FailureClass.REST:
        return Fate(state=DeliveryState.HELD, reason=HoldReason.REST, until=link.rest_until)
    if kind is FailureClass.UNAVAILABLE and (series.is_canary or not link.is_open):
        return HELD_FOR_SERVER
    if not is_last:
        # A refused canary has had its turn; the rest of its attempts comes with the next ones.
        waits = kind is FailureClass.REJECTED and series.is_canary and not link.is_open
        return HELD_FOR_SERVER if waits else AGAIN
    if kind is FailureClass.UNAVAILABLE:
        return HELD_FOR_SERVER
    if kind is FailureClass.OURS:
        return Fate(state=DeliveryState.HELD, reason=HoldReason.OURS, until=now + own_pause(series.holds))
    return FAILED if link.is_open or series.is_canary else HELD_FOR_SERVER


def fails_alone(code: str, series: Series, link: Link) -> bool:
    """Tell whether the delivery itself is at fault: it failed as its server's canary, and another got through since.

    A failure in which nothing answered is always the server's, whichever delivery meets it.
    """
    if not answers(code) or series.is_canary or series.canary_at is None or link.last_success_at is None:
        return False
    return link.last_success_at > series.canary_at


def own_pause(holds: int) -> timedelta:
    """Return how long a fault of ours holds a delivery that it has held `holds` times in a row.

    The times are 1, 2, 4 ... 60 minutes.
    """
    return min(FIRST_OWN_PAUSE * (1 << min(holds, 20)), LONGEST_OWN_PAUSE)
