"""A job that is made of a running one: the next link of its chain, or what is enqueued when it completes."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Final

from workers.jobs import AfterFailure, Claim, JobRef, NewJob
from workers.retry import RetryPolicy, stored_policy
from workers.serde import Serde

_IDS: Final = uuid.UUID("5f1c5f0e-7a38-4a3e-9c0b-2f4d7c1f5a60")


@dataclass(frozen=True, slots=True, kw_only=True)
class NextJob:
    """What a handler says of a job that comes after its own; what is None is as in its own, except the ordering key.

    The metadata, and with it the trace, is that of its own.
    """

    name: str
    payload: object = field(repr=False)
    delay: timedelta = timedelta(0)
    max_attempts: int | None = None
    priority: int | None = None
    ordering_key: str | None = None
    backoff: RetryPolicy | None = None

    def made(self, claim: Claim, serde: Serde, *, job_id: str, chain_index: int = 0) -> NewJob:
        """Return the job to enqueue after the claimed one.

        Raises:
            ValueError: an argument is out of its range, or the payload cannot be encoded.
            TypeError: a payload of a type the serde does not know.
        """
        return NewJob(
            id=job_id,
            name=self.name,
            payload=serde.dumps(self.payload),
            delay=self.delay,
            max_attempts=claim.max_attempts if self.max_attempts is None else self.max_attempts,
            keep_completed=claim.keep_completed,
            keep_failed=claim.keep_failed,
            priority=claim.priority if self.priority is None else self.priority,
            ordering_key=self.ordering_key,
            backoff=stored_policy(self.backoff) or claim.backoff,
            chain_index=chain_index,
            meta=claim.meta,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUp(NextJob):
    """The job that a handler asked for by `Job.then`."""

    id: str
    after: tuple[str, ...] = ()
    after_elsewhere: tuple[JobRef, ...] = ()
    after_failure: AfterFailure = AfterFailure.FAIL

    def new_job(self, claim: Claim, serde: Serde) -> NewJob:
        """Return the job to enqueue when the claimed one completes; see `made` for errors."""
        new = self.made(claim, serde, job_id=self.id)
        return replace(new, after=self.after, after_elsewhere=self.after_elsewhere, after_failure=self.after_failure)


def follow_up_id(job_id: str, generation: object, chain_index: int) -> str:
    """Make the id of the job that follows: the same in every attempt, and another one for each generation.

    Where the completion and the enqueue are not one step, an attempt that is repeated enqueues no second one.
    """
    return str(uuid.uuid5(_IDS, f"{generation} {chain_index} {job_id}"))
