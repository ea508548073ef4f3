"""What becomes of a job whose attempt failed, and who is told of every job that fails for good.

The record is kept, so that what nobody could be told is still found by `Management.failed`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

from workers.details import JobDetails, JobReader
from workers.errors import Retry, StalledError, UnrecoverableError, WaitForChildren, WorkersError
from workers.jobs import Claim, ErrorInfo, Failed, JobRecord, JobState, JobStatus, Retried
from workers.retry import BackoffStrategy, NamedBackoff, RetryPolicy

logger = logging.getLogger(__name__)


def settlement_of_failure(
    claim: Claim, error: BaseException, policy: RetryPolicy, *, now: datetime | None = None
) -> Retried | Failed:
    """Return the settlement that a handler's exception means: a retry after some time, or failed for good."""
    if isinstance(error, UnrecoverableError):
        return Failed(claim=claim, error=ErrorInfo.of(error), keep=error.keep)
    if isinstance(error, StalledError):
        return Failed(claim=claim, error=ErrorInfo.of(error))
    if ends_the_job(error, claim.attempt, claim.max_attempts):
        return Failed(claim=claim, error=ErrorInfo.of(error, exhausted=True))
    return Retried(
        claim=claim,
        delay=_delay(claim, error, policy, now or datetime.now(UTC)),
        error=ErrorInfo.of(error),
        counted=_is_counted(error),
        snoozed=isinstance(error, Retry) and error.snoozed,
    )


def decision_in(error: BaseException) -> BaseException:
    """Return what the handler has decided, if it did so in an `asyncio.TaskGroup`, which wraps what its tasks raise.

    An `UnrecoverableError` decides whatever else the group holds, a `Retry` where there is nothing but such, and a
    counted one before a `Snooze`. Any other error is itself.
    """
    if not isinstance(error, BaseExceptionGroup):
        return error
    raised = list(_leaves(error))
    final = next((one for one in raised if isinstance(one, UnrecoverableError)), None)
    if final is not None:
        return final
    if all(isinstance(one, Retry) for one in raised):
        return max(raised, key=_is_counted)
    return raised[0] if all(isinstance(one, WaitForChildren) for one in raised) else error


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """Yield the exceptions in it and in the groups in it, which may be nested deeper than Python's stack."""
    inner: list[BaseException] = [group]
    while inner:
        one = inner.pop(0)
        if isinstance(one, BaseExceptionGroup):
            inner[:0] = one.exceptions
        else:
            yield one


def policy_after(error: BaseException, policy: RetryPolicy | None, fallback: RetryPolicy) -> RetryPolicy:
    """Return the job's own policy, or else `fallback`.

    A job that repeats its failures at once must not spin while its handler only says that it is busy.
    """
    spins = policy is not None and not policy.initial and not _is_counted(error)
    return fallback if policy is None or spins else policy


def ends_the_job(error: BaseException, attempt: int, max_attempts: int) -> bool:
    """Tell whether the job fails for good when this attempt raises `error`."""
    if isinstance(error, UnrecoverableError | StalledError):
        return True
    return _is_counted(error) and attempt >= max_attempts


def _is_counted(error: BaseException) -> bool:
    return not isinstance(error, Retry) or error.counted


def _delay(claim: Claim, error: BaseException, policy: RetryPolicy, now: datetime) -> timedelta:
    if isinstance(error, Retry):
        if error.delay is not None:
            return max(error.delay, timedelta(0))
        if error.at is not None:
            return max(error.at - now, timedelta(0))
        if error.at_least is not None:
            return max(error.at_least, policy.delay(claim.attempt, error))
    return policy.delay(claim.attempt, error)


MOST_TOLD: Final = 100
"""How many unknown names are told of: any producer may make them up."""


class NamedBackoffs:
    """The strategies of one worker, by name."""

    def __init__(self, strategies: Mapping[str, BackoffStrategy]) -> None:
        self._strategies = dict(strategies)
        self._told: set[str] = set()

    def policy(self, named: NamedBackoff, attempt: int) -> RetryPolicy | None:
        """Return how long to wait after this attempt, always; None, told once, for a name that says nothing here."""
        strategy = self._strategies.get(named.type)
        if strategy is None:
            self._tell(named.type, "is not known to this worker; see WorkerOptions(backoffs=...)")
            return None
        try:
            delay = max(strategy(attempt, named.delay), timedelta(0))
        except Exception as error:  # somebody's function, which must not keep the attempt from ending
            self._tell(named.type, f"failed with {type(error).__name__}: {error}")
            return None
        return RetryPolicy(initial=delay, multiplier=1, maximum=delay, jitter=0)

    def _tell(self, name: str, why: str) -> None:
        if name not in self._told and len(self._told) < MOST_TOLD:
            self._told.add(name)
            logger.warning("jobs wait by the worker's retry policy instead of their back-off %r, which %s", name, why)


OnFailed: TypeAlias = Callable[[JobDetails], Awaitable[None] | None]
"""Called with each job that has failed for good, once that is stored; at least once, and not after a crash.

It has 5 s, in which the job keeps its slot. What it raises is logged and goes no further.
"""

PATIENCE: Final = timedelta(seconds=5)


class FailedJobs:
    """Tells one function of the jobs of one queue that failed."""

    def __init__(self, reader: JobReader, on_failed: OnFailed) -> None:
        self._reader = reader
        self._on_failed = on_failed

    async def tell_of(self, claim: Claim, settlement: Failed) -> None:
        """Tell of a job whose end was just stored."""
        await self._within([claim.job_id], self._tell_of(claim, settlement))

    async def tell(self, records: Sequence[JobRecord]) -> None:
        """Tell of jobs that a reaper has failed."""
        await self._within([record.status.id for record in records], self._tell(records))

    async def _tell_of(self, claim: Claim, settlement: Failed) -> None:
        found = None
        try:
            [found] = await self._reader.storage.read([claim.job_id])
        except WorkersError as error:
            logger.debug("job %r cannot be read: %s", claim.job_id, type(error).__name__)
        # A record that was dropped, or is of the next generation, says nothing of this end.
        kept = found is not None and found.status.state is JobState.FAILED
        await self._tell([found if found is not None and kept else _record_of(claim, settlement)])

    async def _tell(self, records: Sequence[JobRecord]) -> None:
        for record in records:
            answer = self._on_failed(self._reader.details(record))
            if inspect.isawaitable(answer):
                await answer

    async def _within(self, ids: Sequence[str], telling: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(PATIENCE.total_seconds()):
                await telling
        except Exception:  # a bug there must not end the worker, and the job has failed anyway
            logger.exception("on_failed was not told, or not of all, of the failed jobs %s", list(ids))


def _record_of(claim: Claim, settlement: Failed) -> JobRecord:
    """Return what the claim itself tells of a job whose record is gone."""
    status = JobStatus(
        id=claim.job_id,
        name=claim.name,
        state=JobState.FAILED,
        attempt=claim.attempt,
        max_attempts=claim.max_attempts,
        created_at=claim.created_at,
        priority=claim.priority,
        chain_index=claim.chain_index,
        last_error=settlement.error,
    )
    return JobRecord(status=status, payload=claim.payload, meta=claim.meta)
