"""Background tasks of the application, run by the node's own worker processes.

The application declares tasks with `task`, in modules that the setting FEDERATION_TASKS names; a process that delivers
imports these and runs a worker for them, on the queue `federation-tasks`. Every such process needs all modules: where
the queue cannot filter by name, a worker fails a task that it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Final

from sqlalchemy.ext.asyncio import AsyncSession

from federation.errors import ConfigurationError
from federation.process import get_federation
from workers import (
    DeduplicationMode,
    Enqueued,
    EnqueueOptions,
    Handler,
    QueueTasks,
    Serde,
    Task,
    TaskMessage,
    Tasks,
    Unsupported,
)


class _NodesQueue:
    """The tasks queue of this process's node, which is not looked for before a task is enqueued."""

    native_retrial = True

    @property
    def native_deduplication(self) -> bool:
        return self._tasks().native_deduplication

    @property
    def serde(self) -> Serde:
        return self._tasks().serde

    async def enqueue(self, messages: Sequence[TaskMessage], options: EnqueueOptions) -> str | None:
        return await self._tasks().enqueue(messages, options)

    def _tasks(self) -> QueueTasks:
        return QueueTasks(get_federation().tasks_queue)


_TASKS: Final = Tasks(_NodesQueue(), deduplication_fallback="closed")

task = _TASKS.task
"""See `Tasks.task`: the decorated function is a task of the application."""


async def enqueue_task(
    task: Task,
    data: object,
    *,
    session: AsyncSession | None = None,
    deduplication_key: str | None = None,
    deduplication_mode: DeduplicationMode = DeduplicationMode.THROTTLE,
    delay: timedelta = timedelta(0),
    ordering_key: str | None = None,
) -> Enqueued:
    """One run of the task is queued, or `duplicate` is answered with the id of the job that has the key.

    With `session` both are part of its transaction: job and key are there if it commits, and from then on.

    Raises:
        Unsupported: a session, but the queues are not in its database; a mode or a key that the queue cannot keep.
        TypeError: a deduplication key without a session, but nothing can keep it; data that is not JSON.
        ValueError: see `Tasks.enqueue_task`.
        StorageUnavailable: the queue did not answer.
    """
    if session is None:
        return await _TASKS.enqueue_task(
            task,
            data,
            deduplication_key=deduplication_key,
            deduplication_mode=deduplication_mode,
            delay=delay,
            ordering_key=ordering_key,
        )
    federation = get_federation()
    if not federation.queues_join_database:
        raise Unsupported(
            f"task {task.name!r}: the queues are not in the application's database; enqueue it without `session`, "
            "after the transaction"
        )
    spec = _TASKS.spec(
        task,
        data,
        deduplication_key=deduplication_key,
        deduplication_mode=deduplication_mode,
        delay=delay,
        ordering_key=ordering_key,
    )
    return (await federation.tasks_queue.enqueue_many([spec], connection=session))[0]


def declared_tasks(modules: Sequence[str]) -> Mapping[str, Handler]:
    """The application's tasks as handlers: those of `modules`, which are imported, and those declared before.

    Raises:
        ConfigurationError: lists every module that cannot be imported; or none of them declares a task.
    """
    problems = []
    for name in modules:
        try:
            import_module(name)
        except ImportError as error:
            problems.append(
                f"FEDERATION_TASKS: {name} cannot be imported: {error}; install the application, or add its directory "
                "to PYTHONPATH"
            )
    handlers = _TASKS.handlers()
    if modules and not problems and not handlers:
        problems.append(
            f"FEDERATION_TASKS: {', '.join(modules)}: nothing there is declared with `federation.tasks.task`"
        )
    if problems:
        raise ConfigurationError(problems)
    return handlers
