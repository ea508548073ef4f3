"""A declared task, and what checks its payloads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from workers.errors import CorruptPayloadError
from workers.tasks.unique import Unique
from workers.worker.attempt import invoke
from workers.worker.handlers import Handler, HandlerFunction, Job

Validate: TypeAlias = Callable[[object], object]
"""Turns decoded data into what a task's function works on; raises `ValueError` or `TypeError` for bad data."""


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A declared task; `Tasks.task` makes it."""

    name: str
    handler: Handler
    validate: Validate | None
    max_attempts: int | None
    key: str | None
    """The argument, or the entry of the data, that has the key of the task's limit."""
    unique: Unique | None
    """Which enqueues of it count as one."""

    def limit_key(self, data: object) -> str | None:
        """Return the key of the task's limit that is in this data.

        Raises:
            ValueError: there is none, or an empty one.
        """
        if self.key is None:
            return None
        data = self.completed(data)
        value = data.get(self.key) if isinstance(data, Mapping) else None
        if value is None or value == "":
            raise ValueError(f"task {self.name!r}: its limit is per {self.key!r}, which these data lack")
        return str(value)

    def completed(self, data: object) -> object:
        """Return the data as a run will have them, for what keys are made of."""
        return data

    @property
    def says_why(self) -> bool:
        """Whether what `validate` says of bad data quotes none of them, so that it may be shown."""
        return False

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
            why = str(error) if task.says_why else type(error).__name__
            raise CorruptPayloadError(f"job {job.id!r}: task {task.name!r} refuses its payload: {why}") from None
        return await invoke(fn, replace(job, payload=payload))

    return run
