"""What recurs, as a storage keeps it: in rows that workers replace, or as what it repeats by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from workers.jobs.job import NewJob
from workers.retention import KEEP_FAILED, Retention


class Missed(StrEnum):
    """What becomes of times at which no worker was there.

    `skip`: nothing runs for a time that is more than a minute over. `once`: one job stands for all of them. `all`: each
    has its job, up to 100 of the oldest.
    """

    SKIP = "skip"
    ONCE = "once"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """What recurs, whoever wrote it: nothing here is checked, see `workers.crons.Cron` for that.

    Another program on the queue may have no version (0 here), and no time zone (empty here).
    """

    name: str
    job: str
    pattern: str | None = None
    every: timedelta | None = None
    timezone: str = "UTC"
    version: int = 1
    missed: Missed = Missed.ONCE
    payload: bytes = field(default=b"null", repr=False)
    max_attempts: int = 3
    priority: int = 0
    ordering_key: str | None = None
    keep_completed: Retention = timedelta(hours=1)
    keep_failed: Retention = KEEP_FAILED

    def recurs_as(self, other: Recurrence) -> bool:
        """Tell whether both come at the same times."""
        mine, theirs = ((one.pattern, one.every, one.timezone) for one in (self, other))
        return mine == theirs

    def job_called(self, suffix: str) -> NewJob:
        """Return a job whose id ends with this."""
        return NewJob(
            id=f"cron:{self.name}:{suffix}",
            name=self.job,
            payload=self.payload,
            max_attempts=self.max_attempts,
            priority=self.priority,
            ordering_key=self.ordering_key,
            keep_completed=self.keep_completed,
            keep_failed=self.keep_failed,
        )


class Declared(StrEnum):
    """What became of a definition that was declared."""

    STORED = "stored"
    KEPT = "kept"
    """The same one is stored already, or a newer one."""
    DIFFERENT = "different"
    """Another one of the same version is stored, and stays."""
    REMOVED = "removed"
    """It was removed in this version, or a newer one."""
    FOREIGN = "foreign"
    """Another program stored one of that name, which stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """What recurs as a storage has it that repeats it by itself, and when its next job is due."""

    cron: Recurrence
    due: datetime


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
