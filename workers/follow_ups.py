"""A job that is enqueued in the step in which another completes."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from workers.jobs import Claim, NewJob
from workers.retry import RetryPolicy
from workers.serde import Serde

_IDS: Final = uuid.UUID("5f1c5f0e-7a38-4a3e-9c0b-2f4d7c1f5a60")


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUp:
    """The job that a handler asked for by `Job.then`."""

    id: str
    name: str
    payload: object = field(repr=False)
    delay: timedelta = timedelta(0)
    max_attempts: int | None = None
    priority: int | None = None
    ordering_key: str | None = None
    backoff: RetryPolicy | None = None

    def new_job(self, claim: Claim, serde: Serde) -> NewJob:
        """Return the job to enqueue; what is None is as in the claimed job, except for the ordering key.

        Raises:
            ValueError: an argument of `Job.then` is out of its range, or the payload cannot be encoded.
            TypeError: a payload of a type the serde does not know.
        """
        return NewJob(
            id=self.id,
            name=self.name,
            payload=serde.dumps(self.payload),
            delay=self.delay,
            max_attempts=claim.max_attempts if self.max_attempts is None else self.max_attempts,
            keep_completed=claim.keep_completed,
            keep_failed=claim.keep_failed,
            priority=claim.priority if self.priority is None else self.priority,
            ordering_key=self.ordering_key,
            backoff=self.backoff or claim.backoff,
        )


def follow_up_id(job_id: str, generation: object, chain_index: int) -> str:
    """Make the id of the job that follows: the same in every attempt, and another one for each generation.

    Where the completion and the enqueue are not one step, an attempt that is repeated enqueues no second one.
    """
    return str(uuid.uuid5(_IDS, f"{generation} {chain_index} {job_id}"))
