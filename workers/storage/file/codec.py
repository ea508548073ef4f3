"""The entries of a journal: one line of JSON values per change; its first value says which kind.

    ["q", queue]                                 whose journal this is
    ["j", events, id, <job>, <state>]            a job is here for the first time, or goes on as another one
    ["s", events, id, <state>]                   a known job changed
    ["g", events, id]                            a job, or its tombstone, is gone
    ["g", events, id, result]                    a job completed and is gone; the result, in base64, for those who wait
    ["t", events, id, until]                     a job was cancelled: the record that is known of it lasts until then
    ["w", worker id, seen at or null]            a worker was heard of, or forgotten
    ["p", paused]                                claims are stopped, or go on
    ["d", id, policy, [id, ...]]                 a job that is here waits for these to end
    ["e", id, other id]                          it does not wait for that one any more
    ["m", key]                                   a deduplication key is free
    ["m", key, job id, mode, until or null]      a deduplication key stands for a job

A cancelled job is an entry of a failed one, and a "t" behind it. Versions that know no state of that name take it for a
tombstone, and write a "t" alone.

`events` are digits, by position in `EVENTS`. Times and durations are integers of microseconds, times since 1970;
`"drop"` is the retention without a record. Payloads, results and progress are blobs of the frame, in the order of the
entries; an entry holds their length, null for no result. Without progress its length is missing, or null before the
failed attempts, which come last and are missing if there are none.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

from workers.deduplication import DeduplicationMode
from workers.jobs import DROP, AfterFailure, ErrorInfo, JobEventKind, JobState, NewJob, Retention
from workers.retention import told_with_the_end
from workers.retry import RetryPolicy
from workers.storage.file.frames import Entry, Frame
from workers.storage.file.waits import WaitBegun, WaitShortened
from workers.storage.memory.keys import KeyHolder
from workers.storage.memory.lines import StoredJob

EVENTS: Final = tuple(JobEventKind)
"""In the order of their digits: a new kind may only be added at the end."""

Events: TypeAlias = Sequence[JobEventKind]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
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
            result=self.result,
            progress=self.progress,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobGone:
    """The job is gone; with `until` it was cancelled, and what is known of it lasts until then.

    `told` is the result of one that completed and was not to be kept.
    """

    id: str
    events: Events
    until: datetime | None = None
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


Change: TypeAlias = QueueNamed | JobChanged | JobGone | WorkerSeen | Paused | KeyGiven | WaitBegun | WaitShortened


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


def gone_entry(job_id: str, until: datetime | None, events: Events, told: bytes | None = None) -> Entry:
    if until is not None:
        return ("t", _digits(events), job_id, _number(until))
    entry = ("g", _digits(events), job_id)
    return entry if told is None else (*entry, base64.b64encode(told).decode())


def worker_entry(worker_id: str, at: datetime | None) -> Entry:
    return ("w", worker_id, _number(at))


def pause_entry(paused: bool) -> Entry:
    return ("p", paused)


def key_entry(key: str, holder: KeyHolder | None) -> Entry:
    return ("m", key) if holder is None else ("m", key, holder.job_id, holder.mode.value, _number(holder.until))


def decode(frame: Frame) -> list[Change]:
    """Return the changes that the frame's entries describe.

    Raises:
        BadEntry: they are not what this version writes.
    """
    blobs = _Blobs(frame.blobs)
    try:
        changes = [_decode(iter(entry), blobs) for entry in json.loads(frame.entries)]
    except (ValueError, TypeError, KeyError, IndexError, StopIteration, OverflowError) as error:
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
    match next(values):
        case "q":
            return QueueNamed(queue=_text(next(values)))
        case "w":
            return WorkerSeen(id=_text(next(values)), at=_time(next(values)))
        case "p":
            return Paused(paused=bool(next(values)))
        case "m":
            return KeyGiven(key=_text(next(values)), holder=_holder(values))
        case "d":
            return _wait(values)
        case "e":
            return WaitShortened(id=_text(next(values)), dependency=_text(next(values)))
        case "g":
            events, job_id, told = _events(next(values)), _text(next(values)), _optional_text(next(values, None))
            return JobGone(events=events, id=job_id, told=None if told is None else base64.b64decode(told))
        case "t":
            return JobGone(events=_events(next(values)), id=_text(next(values)), until=_moment(next(values)))
        case "j" | "s" as kind:
            return _job(kind == "j", values, blobs)
        case _:
            raise ValueError("no such entry")


def _holder(values: Iterator[object]) -> KeyHolder | None:
    job_id = next(values, None)
    if job_id is None:
        return None
    mode = DeduplicationMode(_text(next(values)))
    return KeyHolder(job_id=_text(job_id), mode=mode, until=_time(next(values)))


def _wait(values: Iterator[object]) -> WaitBegun:
    job_id, policy, left = _text(next(values)), AfterFailure(_text(next(values))), next(values)
    if not isinstance(left, list):
        raise TypeError("no list")
    return WaitBegun(id=job_id, after_failure=policy, left=tuple(map(_text, left)))


def _job(added: bool, values: Iterator[object], blobs: _Blobs) -> JobChanged:
    events, job_id = _events(next(values)), _text(next(values))
    return JobChanged(
        id=job_id,
        events=events,
        new=_new(job_id, values, blobs) if added else None,
        state=JobState(_text(next(values))),
        created_at=_moment(next(values)),
        run_at=_moment(next(values)),
        serial=_integer(next(values)),
        attempts=_integer(next(values)),
        stalls=_integer(next(values)),
        uncounted=_integer(next(values)),
        token=_optional_text(next(values)),
        settled_by=_optional_text(next(values)),
        worker_id=_optional_text(next(values)),
        deadline=_time(next(values)),
        cancel_requested=bool(next(values)),
        finished_at=_time(next(values)),
        kept_until=_time(next(values)),
        last_error=_error(next(values)),
        result=None if (length := next(values)) is None else blobs.take(_integer(length)),
        progress=None if (length := next(values, None)) is None else blobs.take(_integer(length)),
        failures=_optional_text(next(values, None)),
    )


def _state_values(job: StoredJob, kept_until: datetime | None) -> tuple[object, ...]:
    error = job.last_error
    return (
        JobState.FAILED.value if job.state is JobState.CANCELLED else job.state.value,
        _number(job.created_at),
        _number(job.run_at),
        job.serial,
        job.attempts,
        job.stalls,
        job.uncounted,
        job.token,
        job.settled_by,
        job.worker_id,
        _number(job.deadline),
        job.cancel_requested,
        _number(job.finished_at),
        _number(kept_until),
        None if error is None else (error.type, error.message, error.stack, error.exhausted),
        None if job.result is None else len(job.result),
        *_last_values(job),
    )


def _last_values(job: StoredJob) -> tuple[object, ...]:
    """Return what most jobs have none of, and versions before 0.3 do not read."""
    length = None if job.progress is None else len(job.progress)
    if job.failures is not None:
        return length, job.failures
    return () if length is None else (length,)


def _new_values(new: NewJob) -> tuple[object, ...]:
    backoff = new.backoff
    return (
        new.name,
        len(new.payload),
        new.delay // _MICROSECOND,
        new.max_attempts,
        _keep_value(new.keep_completed),
        _keep_value(new.keep_failed),
        new.priority,
        new.ordering_key,
        backoff
        and (backoff.initial // _MICROSECOND, backoff.multiplier, backoff.maximum // _MICROSECOND, backoff.jitter),
        new.chain_index,
    )


def _new(job_id: str, values: Iterator[object], blobs: _Blobs) -> NewJob:
    return NewJob(
        id=job_id,
        name=_text(next(values)),
        payload=blobs.take(_integer(next(values))),
        delay=_duration(next(values)),
        max_attempts=_integer(next(values)),
        keep_completed=_keep(next(values)),
        keep_failed=_keep(next(values)),
        priority=_integer(next(values)),
        ordering_key=_optional_text(next(values)),
        backoff=_backoff(next(values)),
        chain_index=_integer(next(values)),
    )


def _keep_value(keep: Retention) -> object:
    return keep // _MICROSECOND if isinstance(keep, timedelta) else keep.value


def _keep(value: object) -> Retention:
    return DROP if value == DROP.value else _duration(value)


def _backoff(value: object) -> RetryPolicy | None:
    if not isinstance(value, list):
        return None
    initial, multiplier, maximum, jitter = value
    return RetryPolicy(
        initial=_duration(initial), multiplier=float(multiplier), maximum=_duration(maximum), jitter=float(jitter)
    )


def _error(value: object) -> ErrorInfo | None:
    if not isinstance(value, list):
        return None
    kind, message, stack, exhausted = value
    return ErrorInfo(type=_text(kind), message=_text(message), stack=_text(stack), exhausted=bool(exhausted))


def _digits(events: Events) -> str:
    return "".join(_DIGITS[kind] for kind in events)


def _events(value: object) -> Events:
    return [EVENTS[int(digit)] for digit in _text(value)]


def _number(moment: datetime | None) -> int | None:
    return None if moment is None else (moment - _EPOCH) // _MICROSECOND


def _time(value: object) -> datetime | None:
    return None if value is None else _moment(value)


def _moment(value: object) -> datetime:
    return _EPOCH + _duration(value)


def _duration(value: object) -> timedelta:
    return timedelta(microseconds=_integer(value))


def _integer(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError("not a number")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _optional_text(value: object) -> str | None:
    return None if value is None else _text(value)
