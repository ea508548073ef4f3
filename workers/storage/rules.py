"""Decisions that all storages share; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Final

from workers.checks import MAX_DELAY, NO_TIME, check_text
from workers.errors import JobEndedError, StorageError, Unsupported
from workers.jobs import (
    UNCOUNTED_RETRIES,
    Completed,
    Continued,
    ErrorInfo,
    JobRef,
    JobState,
    NewJob,
    Retried,
    Settlement,
    SettleOutcome,
    SettleStatus,
)

WORKER_RECORD: Final = timedelta(hours=1)
"""How long a worker without claims stays listed after it was last seen."""

CRONS_AT_ONCE: Final = 100
"""How many due rows of what recurs one look returns."""

REDIS_VALUE_BYTES: Final = 350 << 20
"""Redis cuts the connection over a string of more than 512 MiB; this leaves room for base64 and the record."""

STARTS_ANEW: Final = frozenset({JobState.FAILED, JobState.CANCELLED})
"""The states from which a new generation begins: by an enqueue of the id, or an operator's retry."""

QUOTED_CHARACTERS: Final = 500
"""How much of a dependency's error the error of its dependents quotes."""

_MOST: Final = (1 << 31) - 1
_CURSOR_DIGITS: Final = 19


def refuse_transaction(connection: object | None, storage: str) -> None:
    """Accept None only: this storage is in no SQL database."""
    if connection is not None:
        raise Unsupported(f"{storage} cannot join a transaction; leave `connection` out")


def refuse_deduplication(jobs: Iterable[NewJob], storage: str) -> None:
    """Accept jobs without keys: this storage keeps none."""
    for job in jobs:
        if job.deduplication is not None:
            raise Unsupported(f"{storage} keeps no deduplication keys (job {job.id!r}); leave `deduplication` out")


COPIED_BYTES: Final = 65_536
"""The largest result that is copied for each job that comes after; of a larger one only the end is told.

Any number of jobs may follow one, and one may follow 1 000, so there has to be a bound to what a step writes for them.
"""


def copied(result: bytes | None) -> bytes | None:
    """Return the result, if it is copied for each job that comes after."""
    return None if result is None or len(result) > COPIED_BYTES else result


def refuse_dependencies(jobs: Iterable[NewJob], storage: str) -> None:
    """Accept jobs that follow no others: this storage lets none wait."""
    for job in jobs:
        if job.follows:
            raise Unsupported(f"{storage} lets no job follow others (job {job.id!r}); leave `after` out")


def next_elsewhere(settlement: Settlement) -> SettleOutcome | None:
    """Return the outcome of a settlement whose next job is to follow jobs of other queues; None for any other.

    For storages that know one queue alone.
    """
    then = settlement.then if isinstance(settlement, Completed | Continued) else None
    if then is None or not then.after_elsewhere:
        return None
    other = then.after_elsewhere[0]
    detail = f"job {then.id!r} is to follow {other!r}: this storage lets jobs follow those of their queue only"
    return SettleOutcome(status=SettleStatus.ERROR, detail=detail)


def refuse_other_queues(jobs: Iterable[NewJob], storage: str) -> None:
    """Accept jobs that follow none of another queue: this storage knows one queue alone."""
    for job in jobs:
        if job.after_elsewhere:
            raise Unsupported(
                f"{storage} lets a job follow jobs of its own queue only: job {job.id!r} is to follow"
                f" {job.after_elsewhere[0]!r}"
            )


def dependency_error(dependency: str | JobRef, ended: JobState | None, cause: ErrorInfo | None) -> ErrorInfo:
    """Return the error of a job that fails because one that it follows did not complete; None: that one is gone."""
    match ended:
        case JobState.CANCELLED:
            why = "was cancelled"
        case JobState.FAILED:
            why = "failed" if cause is None else f"failed: {cause.type}: {cause.message[:QUOTED_CHARACTERS]}"
        case _:
            why = "is gone without a record of how it ended"
    return ErrorInfo(type="DependencyFailed", message=f"job {dependency!r}, which this one was to follow, {why}")


def bounded(duration: timedelta) -> timedelta:
    """Limit the duration to 0 ... 100 years.

    A handler may ask for any delay, and the resulting date must be a valid one.
    """
    return min(max(duration, NO_TIME), MAX_DELAY)


def bounded_count(limit: int) -> int:
    """Limit the count to the range from 0 to the largest that every server can count to."""
    return min(max(limit, 0), _MOST)


def count_retry(settlement: Retried, uncounted: int) -> tuple[bool, int]:
    """Decide whether the retry uses up an attempt.

    Returns that, and how many uncounted retries in a row there have been now; `uncounted` is the number before it.
    """
    if settlement.snoozed:
        return False, uncounted
    if settlement.counted or uncounted >= UNCOUNTED_RETRIES:
        return True, 0
    return False, uncounted + 1


def stalled_error(
    *, worker: str | None, attempts: int, max_attempts: int, stalls: int, max_stalls: int | None = None
) -> ErrorInfo:
    """Return the error of a job that is given up because its workers vanish.

    `worker` and `max_stalls` are given where they are known.
    """
    allowed = "" if max_stalls is None else f" ({max_stalls} allowed)"
    spent = f"attempt {attempts} of {max_attempts}, {stalls} lost leases{allowed}"
    holder = "its worker" if worker is None else f"worker {worker!r}"
    return ErrorInfo(
        type="StalledError",
        message=f"{holder} vanished or lost its lease ({spent}): find what stops it, then retry the job",
        exhausted=attempts >= max_attempts,
    )


def check_fits_redis(job_id: str, value: bytes) -> None:
    """Accept values that fit into a Redis string.

    Raises:
        StorageError: the value is too large; sent all the same, it would look like a server that does not answer.
    """
    if len(value) > REDIS_VALUE_BYTES:
        raise StorageError(f"job {job_id!r}: {len(value)} bytes are more than the {REDIS_VALUE_BYTES} Redis can take")


def unfit_for_redis(settlement: Settlement) -> SettleOutcome | None:
    """Return the outcome of a settlement that is too large for a Redis server; None for any other."""
    size = weight(settlement)
    if size <= REDIS_VALUE_BYTES:
        return None
    detail = f"a result and continuation of {size} bytes are more than {REDIS_VALUE_BYTES}"
    return SettleOutcome(status=SettleStatus.ERROR, detail=detail)


def weight(settlement: Settlement) -> int:
    """Return how many bytes of the caller's the settlement carries."""
    if not isinstance(settlement, Completed | Continued):
        return 0
    result = len(settlement.result) if isinstance(settlement, Completed) else 0
    return result + (0 if settlement.then is None else len(settlement.then.payload))


def check_claim(worker_id: str, leases: Mapping[str, timedelta]) -> None:
    """Accept a worker and names of 1 to 512 bytes, and leases above 0 of at most 100 years.

    A lease that ends as it begins would hand the job to the next worker, and the next, until it counts as stalled.
    """
    check_text("worker id", worker_id)
    for name, lease in leases.items():
        check_text("job name", name)
        if not NO_TIME < lease <= MAX_DELAY:
            raise ValueError(f"the lease of {name!r} must be above 0 and at most 100 years, not {lease}")


def read_cursor(cursor: str | None) -> int:
    """Return the number after which a page begins, -1 for the first page.

    Raises:
        StorageError: `list` never gave this cursor.
    """
    if cursor is None:
        return -1
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < _CURSOR_DIGITS):
        raise foreign_cursor(cursor)
    return int(cursor)


def foreign_cursor(cursor: str) -> StorageError:
    return StorageError(f"cursor {cursor!r} is not one that list() gave; begin again without one")


def link_is_over(job_id: str) -> JobEndedError:
    return JobEndedError(f"chain {job_id!r}: the link that was to be continued has ended before")


def check_cleanable(state: JobState) -> None:
    """Accept the states of jobs that have ended."""
    if not state.is_final:
        raise ValueError(f"only completed, failed and cancelled jobs can be cleaned, not {state.value} ones")
