"""Tasks that recur: what `Tasks.cron` adds to the queue's book."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from workers.crons import Cron, Missed
from workers.errors import Unsupported
from workers.queue import Queue
from workers.tasks.declared import Task
from workers.tasks.runs import DEFAULT_MAX_ATTEMPTS
from workers.tasks.typed import TypedTask, encoded


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
