"""Chains: jobs that follow each other under one id.

Theory of operation. A chain is one job. Instead of a result, its handler returns the next link. The settlement replaces
name, payload and attempts in the record and queues the job again, in one step: there is no moment in which one link is
done and the next does not exist. A repeated settlement changes nothing, because the token that made it no longer holds
the job. So a chain costs what its jobs cost, and is waited for, cancelled, inspected and kept like a single job.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Literal

from workers.follow_ups import NextJob
from workers.jobs import AfterFailure, Claim, Continued, ErrorInfo, JobRef, JobState, JobStatus
from workers.jobs.job import as_jobs, by_queue
from workers.retry import RetryPolicy
from workers.serde import Serde


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation(NextJob):
    """The next link of the running job; made by `continue_with`."""

    after: tuple[str | JobRef, ...] = ()
    after_failure: AfterFailure = AfterFailure.FAIL

    def settlement(self, claim: Claim, serde: Serde, queue: str) -> Continued:
        """Return the settlement that ends the claimed link and starts this one; see `NextJob.made` for errors."""
        then = self.made(claim, serde, job_id=claim.job_id, chain_index=claim.chain_index + 1)
        if self.after:
            own, elsewhere = by_queue(self.after, queue)
            then = replace(then, after=own, after_elsewhere=elsewhere, after_failure=self.after_failure)
        return Continued(claim=claim, then=then)


def continue_with(
    name: str,
    payload: object,
    *,
    delay: timedelta = timedelta(0),
    max_attempts: int | None = None,
    priority: int | None = None,
    ordering_key: str | None = None,
    backoff: RetryPolicy | None = None,
    after: Iterable[str | JobRef] = (),
    after_failure: AfterFailure | Literal["fail", "run"] = AfterFailure.FAIL,
) -> Continuation:
    """Make the value by which a handler continues its job as the next link of its chain, with fresh attempts.

    The handler returns it. `max_attempts`, `priority` and `backoff` default to those of the current link; an
    `ordering_key` is not passed on. The link waits for the jobs `after` which it comes, as by `Queue.enqueue`; one that
    is unknown by then counts as gone. Chains that wait for each other wait for ever.
    """
    return Continuation(
        name=name,
        payload=payload,
        delay=delay,
        max_attempts=max_attempts,
        priority=priority,
        ordering_key=ordering_key,
        backoff=backoff,
        after=as_jobs(after),
        after_failure=AfterFailure(after_failure),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A chain as it stands: its current or last link and, once it has ended, its result or error.

    `index` counts links from 0; `attempt` counts the attempts of the current link.
    """

    id: str
    name: str
    index: int
    state: JobState
    attempt: int
    created_at: datetime
    finished_at: datetime | None = None
    result: object = field(default=None, repr=False)
    error: ErrorInfo | None = None

    @classmethod
    def of(cls, status: JobStatus, result: object = None) -> Chain:
        """Return the chain whose job has this status; `result` is the decoded result of a completed one."""
        return cls(
            id=status.id,
            name=status.name,
            index=status.chain_index,
            state=status.state,
            attempt=status.attempt,
            created_at=status.created_at,
            finished_at=status.finished_at,
            result=result,
            error=status.last_error,
        )
