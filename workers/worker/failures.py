"""What becomes of a job whose attempt failed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from workers.errors import Retry, StalledError, UnrecoverableError
from workers.jobs import Claim, ErrorInfo, Failed, Retried
from workers.retry import RetryPolicy


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
            return max(error.at_least, policy.delay(claim.attempt))
    return policy.delay(claim.attempt)
