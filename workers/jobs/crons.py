"""What recurs, as a storage keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class CronRow:
    """A row of what recurs: `body` is text that only `workers.crons` reads.

    `revision` counts the changes. `due` is when somebody has to look at it, to the millisecond; None for never.
    """

    name: str
    revision: int
    due: datetime | None
    body: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CronLook:
    """What a look at the rows found, by the storage's clock; `next_due` is the earliest of all rows."""

    now: datetime
    rows: Sequence[CronRow]
    next_due: datetime | None
