"""The outcome of an attempt for its job, as far as a middleware can see it."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from workers.errors import Retry, WaitForChildren
from workers.worker.failures import ends_the_job
from workers.worker.handlers import Job, SignalReason


class Outcome(StrEnum):
    """The outcome of an attempt for its job.

    `retried`: the job runs again later; `snoozed`: so it does, and this was no attempt; `released`: it goes back
    uncounted, because its worker stops; `suspended`: it waits for its children, uncounted, and then runs again;
    `lease_lost`: another worker has the job, and nothing that the handler did has an effect on it; `abandoned`: its
    worker ends before its plain function, and another has the job once the lease is over.
    """

    COMPLETED = "completed"
    RETRIED = "retried"
    SNOOZED = "snoozed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    RELEASED = "released"
    SUSPENDED = "suspended"
    LEASE_LOST = "lease_lost"
    ABANDONED = "abandoned"


_INTERRUPTED: Final = {SignalReason.SHUTDOWN: Outcome.RELEASED, SignalReason.CANCELLED: Outcome.CANCELLED}


def outcome_of(job: Job, error: BaseException | None) -> Outcome:
    """Return the outcome of an attempt that raised `error`, or returned (None).

    A middleware sees only what goes through it: no attempts whose handler never ran (an unknown name, a payload that
    cannot be decoded), no result that cannot be encoded, no lease lost while the attempt is settled. A handler past its
    `timeout` shows as cancelled, which is a failure here as everywhere.
    """
    if job.signal.reason is SignalReason.LEASE_LOST:
        return Outcome.LEASE_LOST
    if error is None:
        return Outcome.COMPLETED
    if job.run.is_abandoned:
        return Outcome.ABANDONED
    if job.signal.reason is not None:
        return _INTERRUPTED[job.signal.reason]
    if isinstance(error, WaitForChildren):
        return Outcome.SUSPENDED
    if isinstance(error, Retry) and error.snoozed:
        return Outcome.SNOOZED
    return Outcome.FAILED if ends_the_job(error, job.attempt, job.max_attempts) else Outcome.RETRIED
