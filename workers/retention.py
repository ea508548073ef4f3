"""Retention: how long the record of a job that has ended lasts."""

from __future__ import annotations

from datetime import timedelta
from enum import Enum
from typing import Final, Literal, TypeAlias

from workers.checks import MAX_DELAY


class Drop(Enum):
    """The type of `DROP`."""

    DROP = "drop"


DROP: Final = Drop.DROP
"""Retention: the record vanishes in the step that settles the job."""

Retention: TypeAlias = timedelta | Literal[Drop.DROP]

KEEP_FAILED: Final = timedelta(days=7)
"""How long the record of a failed or cancelled job lasts unless somebody says otherwise: over any weekend."""


def check_retention(value: Retention) -> None:
    """Accept `DROP` or a positive duration of at most 100 years."""
    if value is not DROP and not timedelta(0) < value <= MAX_DELAY:
        raise ValueError(f"a retention is DROP or a duration up to 100 years above zero, not {value}")
