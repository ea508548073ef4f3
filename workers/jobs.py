"""The values that cross the Storage seam: jobs, claims, settlements and what became of them."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum, StrEnum
from typing import Final, Literal, TypeAlias

from workers.bounds import MAX_ATTEMPTS, MAX_CHAIN_INDEX, MAX_DELAY, MAX_PRIORITY, check_progress, check_whole
from workers.deduplication import Deduplication, DeduplicationMode
from workers.errors import LossReason, Retry
from workers.ids import check_text
from workers.retry import RetryPolicy

UNCOUNTED_RETRIES: Final = 100  # in a row, before one is counted after all, so that none can loop for ever
MESSAGE_CHARACTERS: Final = 2_000
STACK_CHARACTERS: Final = 8_000


class Drop(Enum):
    """The type of `DROP`."""

    DROP = "drop"


DROP: Final = Drop.DROP
"""Retention: the record vanishes in the step that settles the job."""

Retention: TypeAlias = timedelta | Literal[Drop.DROP]


class JobState(StrEnum):
    """The public state of a job. A scheduled or failing job that is due reads as queued."""

    QUEUED = "queued"
    SCHEDULED = "scheduled"
    PROCESSING = "processing"
    FAILING = "failing"
    COMPLETED = "completed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorInfo:
    """A failure as it is stored: the exception's type, message and stack, cut to 2 000 and 8 000 characters.

    `exhausted` marks the failure that used up the last attempt.
    """

    type: str
    message: str
    stack: str = ""
    exhausted: bool = False

    @classmethod
    def of(cls, error: BaseException, *, exhausted: bool = False) -> ErrorInfo:
        """The stored form of `error`; the stack holds source lines, never values of variables."""
        # A Retry is a decision, not a failure: its stack would say nothing and costs more than all the rest.
        stack = "" if isinstance(error, Retry) else "".join(traceback.format_exception(error, limit=-12))
        return cls(
            type=type(error).__name__,
            message=_storable(_message(error))[:MESSAGE_CHARACTERS],
            stack=_storable(stack)[-STACK_CHARACTERS:],
            exhausted=exhausted,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """A job to enqueue.

    `delay` counts from the storage's clock; `backoff` (default: the handler's or worker's) wins over both of those.
    `keep_completed` and `keep_failed` say how long the terminal record, and with it deduplication by id, lasts.
    Of one `ordering_key` never two jobs run at once. `chain_index` says which link of its chain the job is. With a
    `deduplication` by debounce, `delay` is at least its time.

    Raises:
        ValueError: an id or name that is not 1 to 512 bytes of UTF-8, a priority that is no whole number within
            0 ... 2 097 151, a delay outside 0 ... 100 years, a retention that is not positive, attempts that are no
            whole number within 1 ... 1 000 000, a chain index that is none within 0 ... 1 000 000.
        TypeError: a payload that is not bytes, an id or name that is not text.
    """

    id: str
    name: str
    payload: bytes = field(repr=False)
    delay: timedelta = timedelta(0)
    max_attempts: int = 3
    keep_completed: Retention = timedelta(hours=1)
    keep_failed: Retention = timedelta(hours=1)
    priority: int = 0
    ordering_key: str | None = None
    backoff: RetryPolicy | None = None
    chain_index: int = 0
    deduplication: Deduplication | None = None

    def __post_init__(self) -> None:
        check_text("job id", self.id)
        check_text("job name", self.name)
        if not isinstance(self.payload, bytes):
            raise TypeError(f"job {self.id!r}: payload must be bytes, not {type(self.payload).__name__}")
        if self.ordering_key is not None:
            check_text("ordering key", self.ordering_key)
        if not timedelta(0) <= self.delay <= MAX_DELAY:
            raise ValueError(f"job {self.id!r}: delay must be from 0 to 100 years, not {self.delay}")
        check_whole(f"job {self.id!r}: priority", self.priority, 0, MAX_PRIORITY)
        check_whole(f"job {self.id!r}: max_attempts", self.max_attempts, 1, MAX_ATTEMPTS)
        check_whole(f"job {self.id!r}: chain_index", self.chain_index, 0, MAX_CHAIN_INDEX)
        check_retention(self.keep_completed)
        check_retention(self.keep_failed)
        dedup = self.deduplication
        if dedup is not None and not isinstance(dedup, Deduplication):
            raise TypeError(f"job {self.id!r}: deduplication is a Deduplication, not {dedup!r}")
        if dedup is not None and dedup.mode is DeduplicationMode.DEBOUNCE and dedup.ttl is not None:
            object.__setattr__(self, "delay", max(self.delay, dedup.ttl))


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One worker's right to run one attempt of a job until its lease ends.

    `token` fences: only it may renew and settle, and it is never used twice. `attempt` counts this run, the first is 1.
    `timeout` is the job's own bound on this run; of it and the handler's the lesser counts.
    """

    job_id: str
    name: str
    payload: bytes = field(repr=False)
    token: str
    worker_id: str
    lease: timedelta
    attempt: int
    max_attempts: int
    created_at: datetime
    keep_completed: Retention
    keep_failed: Retention
    priority: int = 0
    backoff: RetryPolicy | None = None
    timeout: timedelta | None = None
    chain_index: int = 0
    stalled: ErrorInfo | None = None
    """Set where a storage tells only at the claim that the job stalled too often, or that its payload is gone: settle
    it as failed, run nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The attempt succeeded. `keep` overrides the job's own retention; `then` is enqueued in the same step.

    Raises:
        ValueError: `then` has a deduplication key, which only `enqueue` takes.
    """

    claim: Claim
    result: bytes = field(repr=False)
    keep: Retention | None = None
    then: NewJob | None = None

    def __post_init__(self) -> None:
        if self.then is not None and self.then.deduplication is not None:
            raise ValueError(f"job {self.then.id!r} follows a completion: it cannot have a deduplication key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """The attempt succeeded and its job goes on as `then`, the next link of its chain, under the same id.

    The record keeps its id and its date, and gets everything else from `then`, with fresh attempts; it stands behind
    the jobs that wait already.

    Raises:
        ValueError: `then` has another id, or a deduplication key: the chain keeps the one it was enqueued by.
    """

    claim: Claim
    then: NewJob

    def __post_init__(self) -> None:
        if self.then.id != self.claim.job_id:
            raise ValueError(f"job {self.claim.job_id!r} cannot be continued as {self.then.id!r}: a chain has one id")
        if self.then.deduplication is not None:
            raise ValueError(f"job {self.claim.job_id!r}: a chain has the deduplication key it was enqueued by")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried:
    """The attempt failed and runs again after `delay`.

    An uncounted retry gives the attempt back; after 100 in a row the next is counted, unless it was `postponed`.
    """

    claim: Claim
    delay: timedelta
    error: ErrorInfo
    counted: bool = True
    postponed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The job failed for good. `keep` overrides the job's own retention."""

    claim: Claim
    error: ErrorInfo
    keep: Retention | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """The attempt did not happen: uncounted, and claimable at once."""

    claim: Claim


Settlement: TypeAlias = Completed | Continued | Retried | Failed | Released


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressReport:
    """How far a claimed job has come: JSON of the handler's choice.

    Raises:
        ValueError: longer than 4 KiB.
    """

    claim: Claim
    value: bytes = field(repr=False)

    def __post_init__(self) -> None:
        check_progress(self.value)


class SettleStatus(StrEnum):
    """What a settlement did."""

    APPLIED = "applied"
    ALREADY_APPLIED = "already_applied"
    LOST = "lost"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleOutcome:
    """What became of one settlement; `reason` with `lost`, `detail` with `error`."""

    status: SettleStatus
    reason: LossReason | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """Claims (by token) that lost their job, and those whose job somebody asked to cancel."""

    lost: Mapping[str, LossReason] = field(default_factory=dict)
    cancel_requested: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Ids of jobs whose lease had expired: back in the queue, or failed with `StalledError`."""

    requeued: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


class EnqueueStatus(StrEnum):
    """`queued`: inserted; `completed`: its id has a result already.

    `duplicate`: its id exists and is unfinished, or another job has its deduplication key.
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


class CancelResult(StrEnum):
    """`cancelled` (it never runs), `processing` (the request is recorded), or why there was nothing to cancel."""

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
    """How a job ended: the stored result of a completed one, the error of a failed one."""

    kind: OutcomeKind
    result: bytes | None = field(default=None, repr=False)
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """A job as it stands; `attempt` counts the runs so far, `next_run_at` is set while it waits for a time.

    `progress` is what a handler reported last, in whichever attempt.
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
    progress: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page of a listing; `cursor` fetches the next, None means there is none."""

    jobs: tuple[JobStatus, ...]
    cursor: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A worker that claimed or renewed lately."""

    id: str
    seen_at: datetime
    claims: int


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
    """One change of one job."""

    kind: JobEventKind
    job_id: str


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # somebody's `__str__`, which must not keep the attempt from ending
        return f"(its message cannot be read: {type(broken).__name__})"


def _storable(text: str) -> str:
    """Lone surrogates, as in names of files that are not UTF-8, become escapes."""
    return text.encode(errors="backslashreplace").decode()


def check_retention(value: Retention) -> None:
    """Accept `DROP` or a positive duration of at most 100 years."""
    if value is not DROP and not timedelta(0) < value <= MAX_DELAY:
        raise ValueError(f"a retention is DROP or a duration up to 100 years above zero, not {value}")
