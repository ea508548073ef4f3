"""What a job left that has ended: its result, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from workers.errors import ErrorInfo, JobCancelledError, JobFailedError, JobGoneError, MaxRetriesError
from workers.jobs import JobOutcome, JobRef, OutcomeKind
from workers.serde import Serde


def result_of(job_id: str, outcome: JobOutcome) -> bytes:
    """Return the result of a job that completed.

    Raises:
        JobFailedError: it failed; `MaxRetriesError` if with its last attempt.
        JobCancelledError: it was cancelled, before it ran or while it ran.
    """
    if outcome.kind is OutcomeKind.COMPLETED:
        assert outcome.result is not None, "a completed job has a result"
        return outcome.result
    if outcome.kind is OutcomeKind.CANCELLED:
        raise JobCancelledError(f"job {job_id!r} was cancelled")
    error = outcome.error
    raise (MaxRetriesError if error is not None and error.exhausted else JobFailedError)(job_id, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedJob:
    """A job that has ended, as one reads it that came after it; see `Job.results`.

    `outcome` is None if it was removed, or if nobody knew it.
    """

    job: JobRef
    outcome: JobOutcome | None
    result_serde: Serde = field(repr=False)

    @property
    def completed(self) -> bool:
        return self.outcome is not None and self.outcome.kind is OutcomeKind.COMPLETED

    @property
    def error(self) -> ErrorInfo | None:
        """Why it failed; None if it did not."""
        return None if self.outcome is None else self.outcome.error

    @property
    def encoded_result(self) -> bytes:
        """The bytes that the storage keeps of the result.

        Raises:
            JobFailedError: it failed; `MaxRetriesError` if with its last attempt.
            JobCancelledError: it was cancelled.
            JobGoneError: it was removed, or nobody knew it, or its result was too large for a copy; the message says
                which.
        """
        if self.outcome is None:
            raise JobGoneError(f"job {self.job!r} was removed before it completed, or never was")
        if self.completed and self.outcome.result is None:
            raise JobGoneError(
                f"job {self.job!r} completed, but its result is too large to be copied for those that come after it;"
                " `get_result` of its queue has it while its record is kept"
            )
        return result_of(self.job.id, self.outcome)

    @property
    def result(self) -> Any:  # Any: what its handler returned
        """The decoded result.

        Raises:
            ValueError: the worker's serde cannot decode it; there is `encoded_result`, which says what else is raised.
        """
        return self.result_serde.loads(self.encoded_result)
