"""Recurring work: who runs what, and how it went."""

from datetime import datetime
from enum import StrEnum

from sqlalchemy import Text
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
