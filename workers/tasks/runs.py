"""Runs of tasks that a foreign queue hands over, their repetition where that queue has none, and tasks that recur."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

from workers.checks import MAX_DELAY
from workers.crons import Cron, Missed
from workers.errors import Unsupported
from workers.jobs import DROP, UNCOUNTED_RETRIES, Claim, Retried
from workers.queue import Queue
from workers.retry import RetryPolicy
from workers.tasks.declared import Task
from workers.tasks.queue import EnqueueOptions, TaskMessage, TaskQueue
from workers.tasks.typed import TypedTask, encoded
from workers.worker.attempt import Attempt, Runner
from workers.worker.handlers import Handler, HandlerTable

DEFAULT_MAX_ATTEMPTS: Final = 3

_LOG = logging.getLogger(__name__)


class TaskRuns:
    """Runs messages of one queue; `retry` is the back-off of tasks that have none of their own."""

    def __init__(self, queue: TaskQueue, retry: RetryPolicy) -> None:
        self._queue = queue
        self._retry = retry

    async def run(self, message: TaskMessage, handlers: Mapping[str, Handler]) -> None:
        """See `Tasks.process`."""
        runner = Runner(
            handlers=HandlerTable(handlers),
            retry=self._retry,
            payload_serde=self._queue.serde,
            result_serde=_NoResults(),
            middlewares=(),
        )
        ending = await runner.run(Attempt(_claim(message), type(self._queue).__name__, _no_progress))
        if ending.error is None:
            return
        if self._queue.native_retrial:
            raise ending.error
        if not isinstance(ending.settlement, Retried) or not await self._repeat(message, ending.settlement):
            what = (message.task, message.id, message.attempt)
            _LOG.error("task %r, job %s failed for good in attempt %d", *what, exc_info=ending.error)

    async def _repeat(self, message: TaskMessage, retried: Retried) -> bool:
        """Enqueue the message again, unless that was its last attempt after all; return whether it was enqueued."""
        again = _next_run(message, retried)
        if again is None:
            return False
        delay = min(retried.delay, MAX_DELAY)
        # Without its deduplication key, which would find the run that just failed.
        await self._queue.enqueue([again], EnqueueOptions(delay=delay, ordering_key=message.ordering_key))
        return True


def _no_progress(claim: Claim, progress: bytes) -> None:
    """Drop the progress: a foreign queue has no place for it."""


class _NoResults:
    """A serde that drops results: a foreign queue has no place for them."""

    def dumps(self, value: object) -> bytes:
        return b""

    def loads(self, data: bytes) -> object:
        return None


def _claim(message: TaskMessage) -> Claim:
    """Return the message as a claim that nobody else can take: its queue sees to that."""
    return Claim(
        job_id=message.id,
        name=message.task,
        payload=message.payload,
        token=message.id,
        worker_id=message.task,
        lease=MAX_DELAY,
        attempt=message.attempt,
        max_attempts=message.max_attempts or DEFAULT_MAX_ATTEMPTS,
        created_at=message.created_at,
        keep_completed=DROP,
        keep_failed=DROP,
    )


def _next_run(message: TaskMessage, retried: Retried) -> TaskMessage | None:
    """Return the message of the next run, or None if that was the last attempt after all."""
    if retried.snoozed:
        return message
    if not retried.counted and message.uncounted < UNCOUNTED_RETRIES:
        return replace(message, uncounted=message.uncounted + 1)
    if message.attempt >= retried.claim.max_attempts:
        return None
    return replace(message, attempt=message.attempt + 1, uncounted=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """When a task recurs, and what becomes of the times at which no worker was there; see `Cron`."""

    pattern: str | None
    every: timedelta | None
    timezone: str
    version: int
    missed: Missed


def recur(queue: Queue | None, task: Task, payload: bytes, times: Times) -> None:
    """Let the task recur: workers of the queue store that when they start.

    Raises:
        Unsupported, ValueError: see `Tasks.cron`.
    """
    if queue is None:
        raise Unsupported(f"task {task.name!r}: only a queue of this package keeps what recurs")
    queue.crons.add(
        Cron(
            name=task.name,
            job=task.name,
            pattern=times.pattern,
            every=times.every,
            timezone=times.timezone,
            version=times.version,
            missed=times.missed,
            payload=payload,
            max_attempts=task.max_attempts or DEFAULT_MAX_ATTEMPTS,
        )
    )


def no_data(task: Task) -> object:
    """Return the data of a run without arguments.

    Raises:
        TypeError: the function needs some.
    """
    return encoded(task) if isinstance(task, TypedTask) else None
