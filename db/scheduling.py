"""Recurring work: who runs what, how it went, and by which clock."""

from datetime import datetime
from enum import StrEnum

from sqlalchemy import Integer, Text, text
from sqlmodel import Field

from db.columns import FederationTable, TextEnum, UtcDateTime


class RunOutcome(StrEnum):
    """How a run of a recurring job ended; `lost`: another process had taken it over."""

    DONE = "done"
    FAILED = "failed"
    LOST = "lost"


class SchedulerJob(FederationTable, table=True):
    """A recurring job: its lease, and its last run.

    The process with the current `token` runs it, until `leased_until`. Each run gets a higher token.
    """

    __tablename__ = "scheduler_jobs"

    # Written by scheduler/leases.
    name: str = Field(sa_type=Text, primary_key=True)
    token: int = 0
    holder: str | None = Field(default=None, sa_type=Text)
    leased_until: datetime | None = Field(default=None, sa_type=UtcDateTime)
    started_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    finished_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    outcome: RunOutcome | None = Field(default=None, sa_type=TextEnum(RunOutcome))
    detail: str | None = Field(default=None, sa_type=Text)


class Sweep(FederationTable, table=True):
    """One row: the last sweep of what is owed.

    After a gap of more than an hour in `swept_at` nothing expires or is purged for 24 hours of sweeping, of which
    `spares_seconds` are left. Jobs that were known before `queue_lost_at` are asked for again: the queue had lost them.
    """

    __tablename__ = "sweeps"

    # Written by delivery/held/sweep_times.
    id: int = Field(sa_type=Integer, primary_key=True, sa_column_kwargs={"autoincrement": False})
    swept_at: datetime = Field(sa_type=UtcDateTime)
    spares_seconds: float = Field(default=0.0, sa_column_kwargs={"server_default": text("0")})
    queue_lost_at: datetime | None = Field(default=None, sa_type=UtcDateTime)


class ProcessClock(FederationTable, table=True):
    """What a process that delivers takes for the time, and what the database does, at the same moment.

    Those of more than a day ago are removed by the next.
    """

    __tablename__ = "process_clocks"

    # Written by base/database_clock, once a minute.
    process: str = Field(sa_type=Text, primary_key=True)
    machine_at: datetime = Field(sa_type=UtcDateTime)
    database_at: datetime = Field(sa_type=UtcDateTime)
