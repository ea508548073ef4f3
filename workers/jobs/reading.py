"""What a queue tells of its jobs: answers to producers and operators, and events."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final, Self
from uuid import UUID

from workers.checks import new_id
from workers.errors import ErrorInfo
from workers.jobs.job import JobState


class EnqueueStatus(StrEnum):
    """The outcome of an enqueue.

    `queued`: inserted; `completed`: its id has a result already; `duplicate`: its id exists and is unfinished, or
    another job has its deduplication key.
    """

    QUEUED = "queued"
    DUPLICATE = "duplicate"
    COMPLETED = "completed"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnqueueResult:
    """What one enqueue did; for a duplicate the state found, for a completed job its stored result too.

    `id` is the new job's own, or that of the job that has its deduplication key; whose state is None if it is gone.
    """

    id: str
    status: EnqueueStatus
    existing_state: JobState | None = None
    result: bytes | None = field(default=None, repr=False)


class Moved(int):
    """How many jobs a verb has moved, and `ids`: which, in no promised order."""

    ids: tuple[str, ...]

    def __new__(cls, ids: Iterable[str]) -> Self:
        those = tuple(ids)
        moved = super().__new__(cls, len(those))
        moved.ids = those
        return moved


class CancelResult(StrEnum):
    """`cancelled`: it never runs again, by this call or an earlier one; `processing`: the request is recorded.

    Otherwise why there was nothing to cancel.
    """

    CANCELLED = "cancelled"
    PROCESSING = "processing"
    NOT_FOUND = "not_found"
    COMPLETED = "completed"
    FAILED = "failed"


class OutcomeKind(StrEnum):
    """How a job ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """How a job ended: the stored result of a completed one, the error of a failed one; a cancelled one has neither.

    See `KnowsDependencies.outcomes` for a completed one without a result.
    """

    kind: OutcomeKind
    result: bytes | None = field(default=None, repr=False)
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """A job as it stands; `attempt` counts the runs so far, `next_run_at` is set while it waits for a time.

    `encoded_progress` is what a handler reported last, in whichever attempt. `last_error` of a cancelled job is that of
    an attempt before the cancel, where the storage keeps it. `waits_for` counts the jobs that a waiting one still
    follows.
    """

    id: str
    name: str
    state: JobState
    attempt: int
    max_attempts: int
    created_at: datetime
    priority: int = 0
    chain_index: int = 0
    next_run_at: datetime | None = None
    finished_at: datetime | None = None
    worker_id: str | None = None
    last_error: ErrorInfo | None = None
    encoded_progress: bytes | None = field(default=None, repr=False)
    waits_for: int = 0

    @property
    def progress(self) -> object:
        """The value that a handler reported last; None if there is none, or if another program wrote no JSON."""
        if self.encoded_progress is None:
            return None
        try:
            value: object = json.loads(self.encoded_progress.decode())
        except (ValueError, RecursionError):
            return None
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page of a listing; `cursor` fetches the next, None means there is none."""

    jobs: tuple[JobStatus, ...]
    cursor: str | None = None


LONGEST_HOST: Final = 63
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TIMED: Final = 7
"""The version of UUIDs that begin with the milliseconds of when they were made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOrigin:
    """Where a worker runs, and since when."""

    host: str
    pid: int
    since: datetime


def new_worker_id() -> str:
    """Make an id for a worker of this process: its host, its process, and what tells it from others.

    So every storage, and every log, tells where a worker runs and since when, and none keeps more of it than its id:
    `web-1:4711:0198c5...`.
    """
    host = "".join(each if each.isascii() and each.isprintable() else "?" for each in socket.gethostname())
    return f"{host[:LONGEST_HOST]}:{os.getpid()}:{new_id()}"


def origin_of(worker_id: str) -> WorkerOrigin | None:
    """Return what the id tells; None for one that an application has chosen, or another program."""
    try:
        host, pid, made = worker_id.rsplit(":", 2)
        unique = UUID(made)
        if not (pid.isascii() and pid.isdecimal() and made == str(unique)):
            return None
        origin = WorkerOrigin(host=host, pid=int(pid), since=_EPOCH + timedelta(milliseconds=unique.int >> 80))
    except (ValueError, OverflowError):
        return None
    return origin if unique.version == _TIMED else None


HEARD_EVERY: Final = timedelta(minutes=1)
"""A worker claims or renews at least this often, also when it is idle, or full of jobs with long leases."""
SILENT_AFTER: Final = 3 * HEARD_EVERY
"""How long a lease goes on that ends later than any may: a clock that was ahead gave it."""
MISSED_AFTER: Final = 1.5 * HEARD_EVERY
"""A worker that lives was heard of by then, even if its storage was slow to answer it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A worker that claimed or renewed lately, and has not said that it stops."""

    id: str
    seen_at: datetime
    claims: int

    @property
    def is_silent(self) -> bool:
        """Whether it was not heard of for 90 s, by this machine's clock: it died, or does not reach the storage."""
        return datetime.now(UTC) - self.seen_at > MISSED_AFTER

    @property
    def origin(self) -> WorkerOrigin | None:
        """Where it runs and since when; None if its id was chosen by an application, or by another program."""
        return origin_of(self.id)


class JobEventKind(StrEnum):
    """What happened to a job in the storage."""

    QUEUED = "queued"
    ACTIVE = "active"
    COMPLETED = "completed"
    FAILING = "failing"
    FAILED = "failed"
    CANCELLED = "cancelled"
    CANCEL_REQUESTED = "cancel_requested"
    PROGRESS = "progress"


TERMINAL_EVENTS: Final = frozenset({JobEventKind.COMPLETED, JobEventKind.FAILED, JobEventKind.CANCELLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """One change of one job.

    `result` is that of a job that completed, where it travels with the event; see `Storage.subscribe`.
    """

    kind: JobEventKind
    job_id: str
    result: bytes | None = field(default=None, repr=False)


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
    meta: Mapping[str, str] = field(default_factory=dict, repr=False)
