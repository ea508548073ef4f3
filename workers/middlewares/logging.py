"""One log line per attempt, and the job's id on every line that its handler logs."""

from __future__ import annotations

import logging
import time
from contextvars import ContextVar
from typing import Final

from workers.middlewares.outcome import Outcome, outcome_of
from workers.worker.events import log_line
from workers.worker.handlers import AttemptContext, Job, Next

logger = logging.getLogger("workers.attempts")

_current: ContextVar[Job | None] = ContextVar("workers_current_job", default=None)

_LEVELS: Final = {
    Outcome.RETRIED: logging.WARNING,
    Outcome.FAILED: logging.ERROR,
    Outcome.LEASE_LOST: logging.WARNING,
    Outcome.ABANDONED: logging.WARNING,
}


async def log_attempts(context: AttemptContext, proceed: Next) -> object:
    """End every attempt with one line of the logger `workers.attempts`, and let its handler's lines name the job.

    The line has the job's id and name, the attempt, the outcome, the seconds it took and the type of the exception, but
    never a payload, result or message. Failures are errors, retries and lost leases are warnings, the rest is info. See
    `AttemptFilter` for the handler's lines.
    """
    _current.set(context.job)  # for good: the attempt's task has a context of its own
    started = time.monotonic()
    error: BaseException | None = None
    try:
        return await proceed()
    except BaseException as raised:
        error = raised
        raise
    finally:
        _log_end(context.job, error, time.monotonic() - started)


def _log_end(job: Job, error: BaseException | None, seconds: float) -> None:
    outcome = outcome_of(job, error)
    logger.log(
        _LEVELS.get(outcome, logging.INFO),
        "job %s (%s) attempt %d of %d: %s after %.3f s%s",
        log_line(job.id),
        log_line(job.name),
        job.attempt,
        job.max_attempts,
        outcome.value,
        seconds,
        f", {type(error).__name__}" if error is not None else "",
    )


class AttemptFilter(logging.Filter):
    """Gives every record `job_id` and `attempt`, for formats like `%(job_id)s`; `-` outside of attempts.

    Add it to the logging handlers whose format names them. It needs `log_attempts` among the worker's middlewares. It
    covers plain functions in their threads, and tasks that a handler starts.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        job = _current.get()
        # Attributes that the record has already stay, as with `Job.log`.
        record.__dict__.setdefault("job_id", "-" if job is None else log_line(job.id))
        record.__dict__.setdefault("attempt", "-" if job is None else job.attempt)
        return True
