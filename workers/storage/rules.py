"""What every storage decides in the same way; pure."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from workers.jobs import MAX_DELAY, UNCOUNTED_RETRIES, ErrorInfo, JobState, Retried

WORKER_RECORD: Final = timedelta(hours=1)
"""How long a worker without claims is listed after it was last seen."""


def bounded(duration: timedelta) -> timedelta:
    """The duration within 0 and 100 years: a handler may ask for any delay, and every date must stay one."""
    return min(max(duration, timedelta(0)), MAX_DELAY)


def count_retry(settlement: Retried, uncounted: int) -> tuple[bool, int]:
    """Whether the retry uses an attempt up, and how many uncounted ones in a row that makes, after `uncounted`."""
    if settlement.postponed:
        return False, uncounted
    if settlement.counted or uncounted >= UNCOUNTED_RETRIES:
        return True, 0
    return False, uncounted + 1


def stalled_error(
    *, worker: str | None, attempts: int, max_attempts: int, stalls: int, max_stalls: int | None = None
) -> ErrorInfo:
    """Why a job whose workers vanish is given up; `worker` and `max_stalls` where they are known."""
    allowed = "" if max_stalls is None else f" ({max_stalls} allowed)"
    spent = f"attempt {attempts} of {max_attempts}, {stalls} lost leases{allowed}"
    holder = "its worker" if worker is None else f"worker {worker!r}"
    return ErrorInfo(
        type="StalledError",
        message=f"{holder} vanished or lost its lease ({spent}): find what stops it, then retry the job",
        exhausted=attempts >= max_attempts,
    )


def check_cleanable(state: JobState) -> None:
    """Accept the states of jobs that have ended."""
    if state not in (JobState.COMPLETED, JobState.FAILED):
        raise ValueError(f"only completed and failed jobs can be cleaned, not {state.value} ones")
