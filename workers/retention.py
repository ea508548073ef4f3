"""Retention: how long the record of a job that has ended lasts."""

from __future__ import annotations

from datetime import timedelta
from enum import Enum
from typing import Final, Literal, TypeAlias

from workers.checks import MAX_DELAY, NO_TIME


class Drop(Enum):
    """The type of `DROP`."""

    DROP = "drop"


DROP: Final = Drop.DROP
"""Retention: the record vanishes in the step that settles the job."""

Retention: TypeAlias = timedelta | Literal[Drop.DROP]

KEEP_FAILED: Final = timedelta(days=7)
"""How long the record of a failed or cancelled job lasts unless somebody says otherwise: over any weekend."""


TOLD_BYTES: Final = 4_096
"""How large a result may be that waiters are told together with the end of its job."""
LEAST_TO_READ: Final = timedelta(minutes=1)
"""How long a larger one is kept at least, so that those who wait for it can read it."""


def kept_for_waiters(result: bytes, keep: Retention) -> Retention:
    """Return how long a result is kept that is to be kept for `keep`: longer, if nobody could read it in time."""
    if len(result) > TOLD_BYTES and keep is not DROP:
        return max(keep, LEAST_TO_READ)
    return keep


def chosen_for_waiters(result: bytes, keep: Retention | None, own: Retention) -> Retention | None:
    """Return the retention chosen for a result in place of its job's `own`; None where that stays."""
    asked = own if keep is None else keep
    kept = kept_for_waiters(result, asked)
    return keep if kept == asked else kept


def told_with_the_end(result: bytes, keep: Retention) -> bytes | None:
    """Return the result if it travels with the event: it is small, and its record may be gone before anybody looks."""
    soon_gone = keep is DROP or keep < LEAST_TO_READ
    return result if soon_gone and len(result) <= TOLD_BYTES else None


def check_retention(value: Retention) -> None:
    """Accept `DROP` or a positive duration of at most 100 years."""
    if value is DROP:
        return
    if not isinstance(value, timedelta):
        raise TypeError(f"a retention is DROP or a timedelta, not {value!r}")
    if not NO_TIME < value <= MAX_DELAY:
        raise ValueError(f"a retention is DROP or a duration up to 100 years above zero, not {value}")
