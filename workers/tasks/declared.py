"""A declared task, and what checks its payloads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from workers.errors import CorruptPayloadError
from workers.worker.handlers import Handler, HandlerFunction, Job, invoke

Validate: TypeAlias = Callable[[object], object]
"""Turns decoded data into what a task's function works on; raises `ValueError` or `TypeError` for bad data."""


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A declared task; `Tasks.task` makes it."""

    name: str
    handler: Handler
    validate: Validate | None
    max_attempts: int | None

    @property
    def fn(self) -> HandlerFunction:
        """The function as it was declared, for tests of one's own."""
        return self.handler.fn


def validated(task: Task) -> HandlerFunction:
    """Return the task's handler function, to be called with what `validate` makes of the payload."""
    validate, fn = task.validate, task.handler.fn
    if validate is None:
        return fn

    async def run(job: Job) -> object:
        try:
            payload = validate(job.payload)
        except (TypeError, ValueError) as error:
            # Not chained: validation errors often quote the data they were given.
            raise CorruptPayloadError(
                f"job {job.id!r}: task {task.name!r} refuses its payload: {type(error).__name__}"
            ) from None
        return await invoke(fn, replace(job, payload=payload))

    return run
