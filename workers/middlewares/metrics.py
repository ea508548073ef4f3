"""Measurement of attempts: how many ended how, and how long they took; and of jobs, from the enqueue to the end."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final, Protocol

from workers.jobs import Claim, NewJob
from workers.middlewares.outcome import Outcome, outcome_of
from workers.worker.events import WorkerEvent, WorkerEventKind
from workers.worker.handlers import AttemptContext, Middleware, Next

_LOG = logging.getLogger(__name__)


class Metrics(Protocol):
    """The place that keeps the numbers."""

    def observe(self, name: str, outcome: Outcome, seconds: float) -> None:
        """Count an ended attempt at a job of this name. Called in the event loop; must be quick."""


def measure_attempts(metrics: Metrics) -> Middleware:
    """Make a middleware that reports the end of every attempt to `metrics`."""

    async def measure(context: AttemptContext, proceed: Next) -> object:
        started = time.monotonic()
        error: BaseException | None = None
        try:
            return await proceed()
        except BaseException as raised:
            error = raised
            raise
        finally:
            metrics.observe(context.job.name, outcome_of(context.job, error), time.monotonic() - started)

    return measure


_ENDS: Final = {
    WorkerEventKind.COMPLETED: Outcome.COMPLETED,
    WorkerEventKind.FAILED: Outcome.FAILED,
    WorkerEventKind.CANCELLED: Outcome.CANCELLED,
}


class JobMeter(ABC):
    """An observer that counts jobs: enqueued by its queue, claimed and ended by its workers, and the leases these lost.

    Give it to a queue as one of its `observers`. The queue of a producer then counts what it enqueues, duplicates
    included. A worker's queue counts each claim, and how long a job's first one was after its enqueue, its delay
    included; jobs that end, also those that a reaper fails, whose names nobody knows; and leases that were lost.
    """

    @abstractmethod
    def enqueued(self, queue: str, name: str, jobs: int) -> None:
        """Count jobs that the storage has taken."""

    @abstractmethod
    def claimed(self, queue: str, name: str, waited: float | None) -> None:
        """Count a claim; `waited` has the seconds since the enqueue if it is the job's first."""

    @abstractmethod
    def ended(self, queue: str, name: str, outcome: Outcome, jobs: int) -> None:
        """Count jobs that are over: `completed`, `failed` or `cancelled`; the name is empty where nobody knows it."""

    @abstractmethod
    def lost(self, queue: str, name: str) -> None:
        """Count a lease that was lost."""

    def __call__(self, event: WorkerEvent) -> None:
        """Count what the event tells."""
        name = "" if event.claim is None else event.claim.name
        if event.kind is WorkerEventKind.ACTIVE and event.claim is not None:
            self.claimed(event.queue, name, _waited(event.claim))
        elif event.kind is WorkerEventKind.LEASE_LOST:
            self.lost(event.queue, name)
        elif (outcome := _ENDS.get(event.kind)) is not None:
            self.ended(event.queue, name, outcome, 1 if event.claim is not None else len(event.job_ids))

    @contextmanager
    def enqueuing(self, queue: str, jobs: list[NewJob]) -> Iterator[list[NewJob]]:
        """See `SurroundsEnqueues.enqueuing`."""
        yield jobs
        try:
            for name, count in Counter(job.name for job in jobs).items():
                self.enqueued(queue, name, count)
        except Exception:  # the jobs are stored: who heard of a failure would enqueue them again
            _LOG.exception("a meter failed on an enqueue in queue %r", queue)


def _waited(claim: Claim) -> float | None:
    if claim.attempt > 1 or claim.chain_index:
        return None
    return max(0.0, (datetime.now(UTC) - claim.created_at).total_seconds())
