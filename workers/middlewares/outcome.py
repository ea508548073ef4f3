"""What an attempt will mean for its job, as far as a middleware can see."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from workers.worker.attempt import ends_the_job
from workers.worker.handlers import Job, SignalReason


class Outcome(StrEnum):
    """`retried`: the job runs again later; `released`: it goes back uncounted, its worker stops; `lease_lost`: whatever
    the handler did, the job is somebody else's.
    """

    COMPLETED = "completed"
    RETRIED = "retried"
    FAILED = "failed"
    CANCELLED = "cancelled"
    RELEASED = "released"
    LEASE_LOST = "lease_lost"


_INTERRUPTED: Final = {SignalReason.SHUTDOWN: Outcome.RELEASED, SignalReason.CANCELLED: Outcome.CANCELLED}


def outcome_of(job: Job, error: BaseException | None) -> Outcome:
    """The outcome of an attempt that raised `error`, or returned (None).

    A middleware sees what goes through it: neither attempts whose handler never ran (an unknown name, a payload that
    cannot be decoded), nor a result that cannot be encoded, nor a lease lost while the attempt is settled. A handler
    past its `timeout` shows as cancelled, which is a failure here as everywhere.
    """
    if job.signal.reason is SignalReason.LEASE_LOST:
        return Outcome.LEASE_LOST
    if error is None:
        return Outcome.COMPLETED
    if job.signal.reason is not None:
        return _INTERRUPTED[job.signal.reason]
    return Outcome.FAILED if ends_the_job(error, job.attempt, job.max_attempts) else Outcome.RETRIED
