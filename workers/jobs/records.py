"""A job as its record has it: what it was given, what became of it, and which attempts failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from workers.jobs.reading import JobStatus

FAILURES_KEPT: Final = 20
"""How many failed attempts of a job are kept, the last ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """One attempt that counted and failed: when, who ran it, and the type and beginning of its error.

    `started_at` is None where nobody could tell: the attempt's worker vanished, or settled without a duration.
    """

    attempt: int
    worker_id: str | None
    started_at: datetime | None
    ended_at: datetime
    error_type: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """All that a storage keeps of a job, see `Storage.read`; the last error is in its status."""

    status: JobStatus
    payload: bytes | None = field(default=None, repr=False)
    result: bytes | None = field(default=None, repr=False)
    failures: tuple[FailedAttempt, ...] = ()
