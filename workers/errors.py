"""What can go wrong, as types a caller can act on; a bug stays `ValueError` or `TypeError`.

A handler decides the fate of its job by what it raises: `Retry` (again, later), `Snooze` (again, later, and no attempt
is counted), `UnrecoverableError` (never again), anything else (again by the retry policy while attempts are left).
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final, Self, TypeVar

from workers.checks import as_duration
from workers.retention import Retention, check_retention

MESSAGE_CHARACTERS: Final = 2_000
STACK_CHARACTERS: Final = 8_000


class WorkersError(Exception):
    """Root of every error this package defines. They travel between processes, as those of a pool do, and are copied.

    By itself an exception is made again from its message, which most of these do not take.
    """

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[object, ...], dict[str, object]]:
        return _remade, (type(self), *self.args), self.__dict__


T = TypeVar("T", bound=WorkersError)


def _remade(kind: type[T], *args: object) -> T:
    return kind.__new__(kind, *args)


class StorageUnavailable(WorkersError):
    """The storage did not answer; nothing is known about the effect of the call. Repeating it is safe.

    `job_ids` are those that an enqueue used, given or made: enqueueing them again enqueues none twice.
    """

    job_ids: tuple[str, ...] = ()

    def naming(self, job_ids: Iterable[str]) -> Self:
        """Return the same error with the ids of an enqueue: several callers may share the one that was raised."""
        named = copy.copy(self)
        named.job_ids = tuple(job_ids)
        return named


class StorageFull(StorageUnavailable):
    """The storage's server has no memory left for what the call would add; nothing more is lost by that.

    Repeating the call is safe, and succeeds once there is room: when jobs have been worked off or removed, when results
    have expired, or when the server's limit is raised (`maxmemory`).
    """


class NotReplicated(StorageUnavailable):
    """The storage made the change, but too few replicas confirmed it in time: it is lost if the master dies now.

    Repeating the call tells whether they have it by then; an id that was enqueued is a duplicate. Of a batch that is
    sent in portions, those after the first that was not confirmed are not made.
    """


class StorageError(WorkersError):
    """The storage answered that it cannot do this: wrong server, foreign data, missing tables. Retrying won't help."""


class StorageDamaged(StorageError):
    """A key of the queue, which the message names, holds data of another kind; nothing was changed.

    The call works again once that key is gone: see `Management.repair`.
    """


class ForeignQueue(StorageError):
    """The queue is another library's, which keeps it in another layout; nothing of it was touched.

    The call works once that library's keys are gone; else the queue needs another name or prefix.
    """


class ServerUnfit(StorageError):
    """The storage's server is set up so that it may lose acknowledged jobs, and nobody has allowed that."""


class TransactionError(WorkersError):
    """A second write was tried on a storage whose transaction the caller holds open; pass `connection=`."""


class ForeignLoop(WorkersError):
    """The object is in use in another event loop, which its connections cannot leave; nothing was written."""


class Unsupported(WorkersError):
    """This storage declares in its `limits` that it cannot keep what was asked for."""


class UnknownDependency(WorkersError, ValueError):
    """A job is to follow others of which the queue knows nothing (any more); nothing of the call was stored."""

    def __init__(self, job_id: str, unknown: Sequence[str | tuple[str, str]]) -> None:
        shown = ", ".join(repr(one) for one in unknown[:3]) + (", ..." if len(unknown) > 3 else "")
        super().__init__(
            f"job {job_id!r} is to follow {shown}: unknown, removed, or ended too long ago to tell how; enqueue those"
            ' before it and keep their records, or let it run however they end (after_failure="run")'
        )
        self.job_id = job_id
        self.unknown = tuple(unknown)


class LossReason(StrEnum):
    """Why a claim no longer holds its job."""

    TAKEN = "taken_by_another_worker"
    COMPLETED = "already_completed"
    NOT_FOUND = "not_found"
    ERROR = "error"


class LeaseLost(WorkersError):
    """The claim no longer holds its job; whatever the handler did afterwards has no effect on it."""

    def __init__(self, job_id: str, reason: LossReason) -> None:
        super().__init__(f"job {job_id!r}: lease lost ({reason.value})")
        self.job_id = job_id
        self.reason = reason


class Retry(WorkersError):
    """Raised by a handler: run the job again after `delay`, or at `at`; with neither, by the retry policy.

    `at_least` lengthens the policy's delay, never shortens it. The attempt counts as a failed one: after the last one
    the job fails. `counted=False` gives it back, at most 100 times in a row. A job that was not tried at all is put off
    by `Snooze`.
    """

    snoozed = False

    def __init__(
        self,
        reason: str = "the handler asked for a retry",
        *,
        delay: timedelta | float | None = None,
        at: datetime | None = None,
        at_least: timedelta | float | None = None,
        counted: bool = True,
    ) -> None:
        if sum(choice is not None for choice in (delay, at, at_least)) > 1:
            raise ValueError("Retry takes one of delay, at and at_least")
        if at is not None and at.tzinfo is None:
            raise ValueError("Retry(at=...) needs an aware datetime")
        super().__init__(reason)
        self.delay = None if delay is None else as_duration("delay", delay)
        self.at = at
        self.at_least = None if at_least is None else as_duration("at_least", at_least)
        self.counted = counted


class Snooze(Retry):
    """Raised by a handler: run the job again after `delay`, or at `at`, and count nothing.

    For jobs that were not tried because something they need is busy or away: a job may be snoozed any number of times,
    and keeps the attempts it has. With neither `delay` nor `at` it waits by the retry policy.
    """

    snoozed = True

    def __init__(
        self,
        delay: timedelta | float | None = None,
        *,
        at: datetime | None = None,
        reason: str = "the handler snoozed the job",
    ) -> None:
        super().__init__(reason, delay=delay, at=at, counted=False)


class WaitForChildren(WorkersError):
    """Raised by a handler, through `Job.wait_for_children`: run the job again when its children have ended.

    The attempt is not counted.
    """


class UnrecoverableError(WorkersError):
    """Raised by a handler: fail the job now, whatever attempts are left.

    `keep` says how long the record of the failure lasts (default: the job's own `keep_failed`). With `DROP` there is no
    record: waiters are told that the job failed, and its id may be enqueued again at once. A subclass may set `keep`
    for all its instances, as an attribute.

    Raises:
        ValueError: `keep` is neither `DROP` nor a duration up to 100 years above zero.
    """

    keep: Retention | None = None

    def __init__(self, *args: object, keep: Retention | None = None) -> None:
        super().__init__(*args)
        if keep is not None:
            check_retention(keep)
            self.keep = keep


class UnknownJobError(UnrecoverableError):
    """No handler is registered for the job's name."""


class ChildFailedError(UnrecoverableError):
    """A child of the job failed for good, and was added so that its parent fails with it."""


class CorruptPayloadError(UnrecoverableError):
    """The payload cannot be decoded by the worker's serde."""


class HandlerTimeout(WorkersError):
    """The handler ran longer than its own or the job's `timeout`; retried like any failure."""


class JobCancelledError(WorkersError):
    """The job was cancelled while it ran, or before it ran."""


class StalledError(WorkersError):
    """The job's worker disappeared too often, or with its last attempt."""


class DependencyFailed(WorkersError):
    """A job that this one was to follow did not complete."""


class JobFailedError(WorkersError):
    """The job that was waited for failed for good; `original` is its stored error, None if that was not kept.

    `payload` is what the job was given, None if that is gone or cannot be decoded.
    """

    payload: object = None

    def __init__(self, job_id: str, original: ErrorInfo | None) -> None:
        why = "its error was not kept" if original is None else f"{original.type}: {original.message}"
        super().__init__(f"job {job_id!r} failed: {why}")
        self.job_id = job_id
        self.original = original


class MaxRetriesError(JobFailedError):
    """The job that was waited for failed with its last attempt; `original` is the error of that attempt."""


class JobTimeoutError(WorkersError):
    """The job that was waited for did not end in time; it keeps running."""


class JobGoneError(WorkersError):
    """The job does not exist: it never did, or its record has expired, and its result with it."""


class JobLockedError(WorkersError):
    """Another program has the locks of the jobs `ids`, which were left as they are; with `done` others all went well.

    Locks are soon given back, or run out: then the call works for these, too.
    """

    def __init__(self, ids: Sequence[str], done: int) -> None:
        shown = ", ".join(repr(job_id) for job_id in ids[:10]) + (", ..." if len(ids) > 10 else "")
        super().__init__(
            f"{len(ids)} jobs are locked by another program and stay as they are: {shown}; repeat this later"
        )
        self.ids = tuple(ids)
        self.done = done


class JobEndedError(WorkersError):
    """The job had ended already, so it cannot be ended in another way."""


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
        """Return the stored form of `error`. The stack holds source lines, never the values of variables."""
        # A Retry is a decision, not a failure: its stack would say nothing and costs more than everything else here.
        stack = "" if isinstance(error, Retry) else _stack(error)
        return cls(
            type=type(error).__name__,
            message=_storable(_message(error))[:MESSAGE_CHARACTERS],
            stack=_storable(stack)[-STACK_CHARACTERS:],
            exhausted=exhausted,
        )


def _stack(error: BaseException) -> str:
    """Format the innermost twelve frames of it and of what led to it, without marks below the lines: to find the place
    of those each line is parsed, which takes longer than all else.
    """
    told = traceback.TracebackException.from_exception(error, limit=-12)
    each: traceback.TracebackException | None = told
    while each is not None:
        for frame in each.stack:
            frame.colno = None
        each = each.__cause__ or each.__context__
    return "".join(told.format())


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as broken:  # of somebody's `__str__`, which must not keep the attempt from ending
        return f"(its message cannot be read: {type(broken).__name__})"


def _storable(text: str) -> str:
    """Escape lone surrogates, as in the names of files that are not UTF-8."""
    return str.encode(text, errors="backslashreplace").decode()  # its class may be somebody's
