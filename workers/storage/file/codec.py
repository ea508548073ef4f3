"""The entries of a journal: one line of JSON values per change; its first value says which kind.

    ["q", queue]                                 whose journal this is
    ["j", events, id, <job>, <state>]            a job is here for the first time, or goes on as another one
    ["s", events, id, <state>]                   a known job changed
    ["g", events, id]                            a job is gone
    ["g", events, id, result]                    a job completed and is gone; the result, in base64, for those who wait
    ["w", worker id, seen at or null]            a worker was heard of, or forgotten
    ["p", paused]                                claims are stopped, or go on
    ["d", id, policy, [id, ...]]                 a job that is here waits for these to end
    ["e", id, other id]                          it does not wait for that one any more
    ["o", id, other id]                          it came after that one, which is gone or was unknown
    ["o", id, other id, state, error, result]    it came after that one, which ended so; the result in base64, or null
    ["m", key]                                   a deduplication key is free
    ["m", key, job id, mode, until or null]      a deduplication key stands for a job
    ["c", name, revision, due or null, body]     a cron's row was replaced
    ["l", name]                                  a limit is gone
    ["l", name, rate, concurrency, burst, version]   a limit is declared
    ["b", key]                                  the bucket of a key is full
    ["b", key, full at]                         the bucket of a key will be full

`events` are digits, by position in `EVENTS`. Times and durations are integers of microseconds, times since 1970;
`"drop"` is the retention without a record. Payloads, results and progress are blobs of the frame, in the order of the
entries; an entry holds their length, null for no result. The last values of a job are the length of its progress, its
failed attempts, and where it was moved back to, a time and a serial; those that it has not are null, or missing at the
end. What may keep a job back is one text, its holding key (`workers.limits`).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final, TypeAlias

from workers.deduplication import DeduplicationMode
from workers.jobs import DROP, ErrorInfo, JobEventKind, JobState, NewJob, Retention
from workers.limits import fair_key_of, limit_key_of, ordering_key_of
from workers.metadata import read_meta
from workers.retention import told_with_the_end
from workers.retry import RetryPolicy
from workers.storage.file.declared import BucketChanged, CronReplaced, LimitDeclared, read_bucket, read_cron, read_limit
from workers.storage.file.frames import Entry, Frame
from workers.storage.file.values import (
    MICROSECOND,
    duration_of,
    error_of,
    integer_of,
    moment_of,
    number_of,
    optional_text_of,
    text_of,
    time_of,
    value_of_error,
)
from workers.storage.file.waits import (
    OutcomeLearned,
    WaitBegun,
    WaitShortened,
    read_outcome,
    read_shortened,
    read_wait,
)
from workers.storage.memory.line import KeyHolder
from workers.storage.memory.lines import StoredJob

EVENTS: Final = tuple(JobEventKind)
"""In the order of their digits: a new kind may only be added at the end."""

Events: TypeAlias = Sequence[JobEventKind]

_DIGITS: Final = {kind: str(number) for number, kind in enumerate(EVENTS)}


class BadEntry(Exception):
    """The frame is whole, but it is not what this version writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueNamed:
    """The queue that the journal belongs to."""

    queue: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobChanged:
    """The state of a job. `new` is None where the job is known already; `job.new` must not be used then."""

    id: str
    events: Events
    new: NewJob | None
    state: JobState
    created_at: datetime
    run_at: datetime
    serial: int
    attempts: int
    stalls: int
    uncounted: int
    token: str | None
    settled_by: str | None
    worker_id: str | None
    deadline: datetime | None
    cancel_requested: bool
    finished_at: datetime | None
    kept_until: datetime | None
    last_error: ErrorInfo | None
    failures: str | None
    moved_back: tuple[datetime, int] | None
    result: bytes | None = field(repr=False)
    progress: bytes | None = field(repr=False)

    @property
    def told(self) -> bytes | None:
        """The result, if it travels with the event of the end."""
        if self.result is None or self.kept_until is None or self.finished_at is None:
            return None
        return told_with_the_end(self.result, self.kept_until - self.finished_at)

    def job(self, new: NewJob) -> StoredJob:
        """Return the job as the entry describes it."""
        return StoredJob(
            new=new,
            state=self.state,
            created_at=self.created_at,
            run_at=self.run_at,
            serial=self.serial,
            attempts=self.attempts,
            stalls=self.stalls,
            uncounted=self.uncounted,
            token=self.token,
            settled_by=self.settled_by,
            worker_id=self.worker_id,
            deadline=self.deadline,
            cancel_requested=self.cancel_requested,
            finished_at=self.finished_at,
            last_error=self.last_error,
            failures=self.failures,
            moved_back=self.moved_back,
            result=self.result,
            progress=self.progress,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobGone:
    """The job is gone; `told` is the result of one that completed and was not to be kept."""

    id: str
    events: Events
    told: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSeen:
    """The time at which a worker was heard of; None: it is forgotten."""

    id: str
    at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """Whether claims are stopped."""

    paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyGiven:
    """The owner of a deduplication key, None for nobody."""

    key: str
    holder: KeyHolder | None


Change: TypeAlias = (
    QueueNamed
    | JobChanged
    | JobGone
    | WorkerSeen
    | Paused
    | KeyGiven
    | WaitBegun
    | WaitShortened
    | OutcomeLearned
    | CronReplaced
    | LimitDeclared
    | BucketChanged
)


def queue_entry(name: str) -> Entry:
    return ("q", name)


def job_entry(job: StoredJob, kept_until: datetime | None, events: Events, *, added: bool) -> tuple[Entry, list[bytes]]:
    """Return the entry and its blobs; with `added` the entry is complete by itself."""
    head: list[object] = ["j" if added else "s", _digits(events), job.new.id]
    blobs = []
    if added:
        head += _new_values(job.new)
        blobs.append(job.new.payload)
    if job.result is not None:
        blobs.append(job.result)
    if job.progress is not None:
        blobs.append(job.progress)
    return (*head, *_state_values(job, kept_until)), blobs


def gone_entry(job_id: str, events: Events, told: bytes | None) -> Entry:
    entry = ("g", _digits(events), job_id)
    return entry if told is None else (*entry, base64.b64encode(told).decode())


def worker_entry(worker_id: str, at: datetime | None) -> Entry:
    return ("w", worker_id, number_of(at))


def pause_entry(paused: bool) -> Entry:
    return ("p", paused)


def key_entry(key: str, holder: KeyHolder | None) -> Entry:
    return ("m", key) if holder is None else ("m", key, holder.job_id, holder.mode.value, number_of(holder.until))


_BAD: Final = (ValueError, TypeError, KeyError, IndexError, StopIteration, OverflowError, RecursionError)


def decode(frame: Frame) -> list[Change]:
    """Return the changes that the frame's entries describe.

    Raises:
        BadEntry: they are not what this version writes.
    """
    blobs = _Blobs(frame.blobs)
    try:
        changes = [_decode(iter(entry), blobs) for entry in json.loads(frame.entries)]
    except _BAD as error:
        raise BadEntry(f"{type(error).__name__}") from error
    if blobs.left:
        raise BadEntry("bytes that belong to no entry")
    return changes


class _Blobs:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._position

    def take(self, length: int) -> bytes:
        if not 0 <= length <= self.left:
            raise ValueError("a blob is missing")
        self._position += length
        return self._data[self._position - length : self._position]


def _decode(values: Iterator[object], blobs: _Blobs) -> Change:
    kind = text_of(next(values))
    return _job(kind == "j", values, blobs) if kind in ("j", "s") else _WITHOUT_BLOBS[kind](values)


def _gone(values: Iterator[object]) -> JobGone:
    events, job_id, told = _events(next(values)), text_of(next(values)), optional_text_of(next(values, None))
    return JobGone(events=events, id=job_id, told=None if told is None else base64.b64decode(told))


def _holder(values: Iterator[object]) -> KeyHolder | None:
    job_id = next(values, None)
    if job_id is None:
        return None
    mode = DeduplicationMode(text_of(next(values)))
    return KeyHolder(job_id=text_of(job_id), mode=mode, until=time_of(next(values)))


_WITHOUT_BLOBS: Final[Mapping[str, Callable[[Iterator[object]], Change]]] = {
    "q": lambda values: QueueNamed(queue=text_of(next(values))),
    "w": lambda values: WorkerSeen(id=text_of(next(values)), at=time_of(next(values))),
    "p": lambda values: Paused(paused=bool(next(values))),
    "m": lambda values: KeyGiven(key=text_of(next(values)), holder=_holder(values)),
    "g": _gone,
    "d": read_wait,
    "e": read_shortened,
    "o": read_outcome,
    "c": read_cron,
    "l": read_limit,
    "b": read_bucket,
}


def _job(added: bool, values: Iterator[object], blobs: _Blobs) -> JobChanged:
    events, job_id = _events(next(values)), text_of(next(values))
    return JobChanged(
        id=job_id,
        events=events,
        new=_new(job_id, values, blobs) if added else None,
        state=JobState(text_of(next(values))),
        created_at=moment_of(next(values)),
        run_at=moment_of(next(values)),
        serial=integer_of(next(values)),
        attempts=integer_of(next(values)),
        stalls=integer_of(next(values)),
        uncounted=integer_of(next(values)),
        token=optional_text_of(next(values)),
        settled_by=optional_text_of(next(values)),
        worker_id=optional_text_of(next(values)),
        deadline=time_of(next(values)),
        cancel_requested=bool(next(values)),
        finished_at=time_of(next(values)),
        kept_until=time_of(next(values)),
        last_error=error_of(next(values)),
        result=None if (length := next(values)) is None else blobs.take(integer_of(length)),
        progress=None if (length := next(values, None)) is None else blobs.take(integer_of(length)),
        failures=optional_text_of(next(values, None)),
        moved_back=None if (at := next(values, None)) is None else (moment_of(at), integer_of(next(values))),
    )


def _state_values(job: StoredJob, kept_until: datetime | None) -> tuple[object, ...]:
    return (
        job.state.value,
        number_of(job.created_at),
        number_of(job.run_at),
        job.serial,
        job.attempts,
        job.stalls,
        job.uncounted,
        job.token,
        job.settled_by,
        job.worker_id,
        number_of(job.deadline),
        job.cancel_requested,
        number_of(job.finished_at),
        number_of(kept_until),
        value_of_error(job.last_error),
        None if job.result is None else len(job.result),
        *_last_values(job),
    )


def _last_values(job: StoredJob) -> tuple[object, ...]:
    """Return what most jobs have none of."""
    length = None if job.progress is None else len(job.progress)
    if job.moved_back is None:
        if job.failures is None:
            return () if length is None else (length,)
        return length, job.failures
    at, serial = job.moved_back
    return length, job.failures, number_of(at), serial


def _new_values(new: NewJob) -> tuple[object, ...]:
    backoff = new.backoff
    return (
        new.name,
        len(new.payload),
        new.delay // MICROSECOND,
        new.max_attempts,
        _keep_value(new.keep_completed),
        _keep_value(new.keep_failed),
        new.priority,
        new.holding_key,
        backoff
        and (backoff.initial // MICROSECOND, backoff.multiplier, backoff.maximum // MICROSECOND, backoff.jitter),
        new.chain_index,
        dict(new.meta) or None,
    )


def _new(job_id: str, values: Iterator[object], blobs: _Blobs) -> NewJob:
    return NewJob(
        id=job_id,
        name=text_of(next(values)),
        payload=blobs.take(integer_of(next(values))),
        delay=duration_of(next(values)),
        max_attempts=integer_of(next(values)),
        keep_completed=_keep(next(values)),
        keep_failed=_keep(next(values)),
        priority=integer_of(next(values)),
        ordering_key=None if (key := optional_text_of(next(values))) is None else ordering_key_of(key),
        limit_key=None if key is None else limit_key_of(key),
        fair_key=None if key is None else fair_key_of(key),
        backoff=_backoff(next(values)),
        chain_index=integer_of(next(values)),
        meta=read_meta(next(values)),
    )


def _keep_value(keep: Retention) -> object:
    return keep // MICROSECOND if isinstance(keep, timedelta) else keep.value


def _keep(value: object) -> Retention:
    return DROP if value == DROP.value else duration_of(value)


def _backoff(value: object) -> RetryPolicy | None:
    if not isinstance(value, list):
        return None
    initial, multiplier, maximum, jitter = value
    return RetryPolicy(
        initial=duration_of(initial), multiplier=float(multiplier), maximum=duration_of(maximum), jitter=float(jitter)
    )


def _digits(events: Events) -> str:
    return "".join(_DIGITS[kind] for kind in events)


def _events(value: object) -> Events:
    return [EVENTS[int(digit)] for digit in text_of(value)]
