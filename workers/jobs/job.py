"""What a job is: as it is enqueued, and as a worker claims it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from workers.checks import (
    MAX_ATTEMPTS,
    MAX_CHAIN_INDEX,
    MAX_DELAY,
    MAX_DEPENDENCIES,
    MAX_PRIORITY,
    MIN_PRIORITY,
    NO_TIME,
    check_text,
    check_whole,
)
from workers.deduplication import Deduplication, DeduplicationMode
from workers.errors import ErrorInfo
from workers.limits import FAIR_MARK, RESERVED, LimitKey, check_limit_name
from workers.metadata import check_meta
from workers.retention import KEEP_FAILED, Retention, check_retention
from workers.retry import NamedBackoff, RetryPolicy


class JobState(StrEnum):
    """The public state of a job. A scheduled or failing job that is due reads as queued."""

    QUEUED = "queued"
    SCHEDULED = "scheduled"
    WAITING = "waiting"
    PROCESSING = "processing"
    FAILING = "failing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether a job ends in this state: nothing but a new generation leads out of it."""
        return self in (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED)


class AfterFailure(StrEnum):
    """What becomes of a job when one that it follows does not complete: it is failed, cancelled, removed or unknown.

    `fail`: the job fails at once. `run`: it runs when all that it follows have ended, in whatever way.
    """

    FAIL = "fail"
    RUN = "run"


class JobRef(NamedTuple):
    """A job of a queue by name, where queues share a server or a database."""

    queue: str
    id: str

    def __repr__(self) -> str:
        return f"{self.id!r} of queue {self.queue!r}"


def as_jobs(after: Iterable[str | JobRef]) -> tuple[str | JobRef, ...]:
    """Return the jobs to follow.

    Raises:
        TypeError: one text, which would be taken letter by letter, or one job of another queue.
    """
    if isinstance(after, str | JobRef):
        raise TypeError(f"after is several jobs, as [{after!r}], not one")
    return tuple(after)


def by_queue(after: Iterable[str | JobRef], queue: str) -> tuple[tuple[str, ...], tuple[JobRef, ...]]:
    """Return the ids of the jobs to follow in this queue, and the jobs of others."""
    own: list[str] = []
    elsewhere: list[JobRef] = []
    if after == ():  # as of most jobs
        return (), ()
    for one in as_jobs(after):
        if isinstance(one, JobRef) and one.queue != queue:
            elsewhere.append(one)
        else:
            own.append(one.id if isinstance(one, JobRef) else one)
    return tuple(own), tuple(elsewhere)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """A job to enqueue.

    `delay` counts from the storage's clock; `backoff` (default: the handler's or worker's) wins over both of those.
    `keep_completed` and `keep_failed` say how long the terminal record, and with it deduplication by id, lasts; the
    record of a cancelled job lasts as that of a failed one.
    Of one `ordering_key` never two jobs run at once. Of one `limit_key` as many start, and run, as the queue's `Limit`
    of that name lets. Jobs of one priority with a `fair_key` take turns: one of each key. A job has one of the three
    at most. `chain_index` says which link of its chain the job is. With a
    `deduplication` by debounce, `delay` is at least its time. The job waits until the jobs `after` have ended, and
    those of other queues, `after_elsewhere`; its delay counts from then. See `AfterFailure` and `Storage.enqueue`.
    `meta` stays with the job until its record is gone, and its claims have it.

    Raises:
        ValueError: an id or name that is not 1 to 512 bytes of UTF-8, a priority that is no whole number within
            -1 000 ... 2 097 151, a delay outside 0 ... 100 years, a retention that is not positive, attempts that are
            no whole number within 1 ... 1 000 000, a chain index that is none within 0 ... 1 000 000, more than 1 000
            jobs to follow, or the job itself among them, two of the three keys, an ordering key that begins with
            U+001E, metadata over its size (see `workers.metadata.check_meta`).
        TypeError: a payload that is not bytes, an id or name that is not text, jobs to follow that are no tuple.
    """

    id: str
    name: str
    payload: bytes = field(repr=False)
    delay: timedelta = timedelta(0)
    max_attempts: int = 3
    keep_completed: Retention = timedelta(hours=1)
    keep_failed: Retention = KEEP_FAILED
    priority: int = 0
    ordering_key: str | None = None
    limit_key: LimitKey | None = None
    fair_key: str | None = None
    backoff: RetryPolicy | None = None
    chain_index: int = 0
    deduplication: Deduplication | None = None
    after: tuple[str, ...] = ()
    after_elsewhere: tuple[JobRef, ...] = ()
    after_failure: AfterFailure = AfterFailure.FAIL
    meta: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)

    def __post_init__(self) -> None:
        check_text("job id", self.id)
        check_text("job name", self.name)
        if not isinstance(self.payload, bytes):
            raise TypeError(f"job {self.id!r}: payload must be bytes, not {type(self.payload).__name__}")
        if self.ordering_key is not None:
            check_text("ordering key", self.ordering_key)
            self._check_keys()
        elif self.limit_key is not None or self.fair_key is not None:
            self._check_keys()
        if not NO_TIME <= self.delay <= MAX_DELAY:
            raise ValueError(f"job {self.id!r}: delay must be from 0 to 100 years, not {self.delay}")
        try:
            check_whole("priority", self.priority, MIN_PRIORITY, MAX_PRIORITY)
            check_whole("max_attempts", self.max_attempts, 1, MAX_ATTEMPTS)
            check_whole("chain_index", self.chain_index, 0, MAX_CHAIN_INDEX)
        except ValueError as error:
            raise ValueError(f"job {self.id!r}: {error}") from None
        check_retention(self.keep_completed)
        check_retention(self.keep_failed)
        dedup = self.deduplication
        if dedup is not None and not isinstance(dedup, Deduplication):
            raise TypeError(f"job {self.id!r}: deduplication is a Deduplication, not {dedup!r}")
        if dedup is not None and dedup.mode is DeduplicationMode.DEBOUNCE and dedup.ttl is not None:
            object.__setattr__(self, "delay", max(self.delay, dedup.ttl))
        if self.after != () or self.after_elsewhere != ():
            self._check_after()
        if self.meta:
            object.__setattr__(self, "meta", check_meta(self.meta))

    @property
    def holding_key(self) -> str | None:
        """What may keep the job back, as storages hold it; see `workers.limits`."""
        if self.limit_key is not None:
            return self.limit_key.holding_key
        return self.ordering_key if self.fair_key is None else FAIR_MARK + self.fair_key

    @property
    def belongs_to_others(self) -> bool:
        """Whether what becomes of the job may depend on those of its call."""
        return self.deduplication is not None or bool(self.after or self.after_elsewhere)

    def _check_keys(self) -> None:
        given = [key for key in (self.ordering_key, self.limit_key, self.fair_key) if key is not None]
        if len(given) > 1:
            raise ValueError(f"job {self.id!r} has one ordering key, limit key or fair key, not {len(given)}")
        if self.fair_key is not None:
            check_text("fair key", self.fair_key)
        if self.limit_key is not None:
            limit, key = self.limit_key
            check_limit_name(limit)
            if key:
                check_text("limit key", key)
        elif self.ordering_key is not None and self.ordering_key.startswith(RESERVED):
            raise ValueError(f"job {self.id!r}: an ordering key does not begin with U+001E")

    @property
    def follows(self) -> tuple[str | JobRef, ...]:
        """All jobs that it waits for, of its own queue and of others."""
        return (*self.after, *self.after_elsewhere)

    def _check_after(self) -> None:
        if not (isinstance(self.after, tuple) and isinstance(self.after_elsewhere, tuple)):
            raise TypeError(f"job {self.id!r}: the jobs to follow are tuples, not {self.after!r}")
        after, elsewhere = tuple(dict.fromkeys(self.after)), tuple(dict.fromkeys(self.after_elsewhere))
        if len(after) + len(elsewhere) > MAX_DEPENDENCIES:
            count = len(after) + len(elsewhere)
            raise ValueError(f"job {self.id!r}: it may follow {MAX_DEPENDENCIES} jobs at most, not {count}")
        for job_id in (*after, *(one.id for one in elsewhere)):
            check_text("id of a job to follow", job_id)
        for one in elsewhere:
            check_text("queue of a job to follow", one.queue)
        if self.id in after:
            raise ValueError(f"job {self.id!r} cannot follow itself")
        object.__setattr__(self, "after", after)
        object.__setattr__(self, "after_elsewhere", elsewhere)
        object.__setattr__(self, "after_failure", AfterFailure(self.after_failure))


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One worker's right to run one attempt of a job until its lease ends.

    `token` fences: only it may renew and settle, and it is never used twice. `attempt` counts this run, the first is 1.
    `timeout` is the job's own bound on this run; of it and the handler's the lesser counts. `named_backoff` stands for
    `backoff` where the job only names one. `last_error` is that of the last attempt that failed, see
    `JobStatus.last_error`.
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
    named_backoff: NamedBackoff | None = None
    timeout: timedelta | None = None
    chain_index: int = 0
    last_error: ErrorInfo | None = field(default=None, repr=False)
    meta: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    stalled: ErrorInfo | None = None
    """Set where a storage reports only at the claim that the job stalled too often, that its payload is gone, or that a
    child of it failed: settle it as failed, run nothing."""
