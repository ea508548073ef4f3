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

from federation.activitypub.handlers import HANDLERS
from federation.base.errors import ConfigurationError
from federation.runtime.composition import Federation
from federation.runtime.nodes import get_federation
from workers import DeduplicationMode, Enqueued, Handler, JobSpec, Task, Tasks, Unsupported
from workers.kv import ConditionalKvStore, Key
from workers.serde import Serde
from workers.tasks.queue import EnqueueOptions, QueueTasks, TaskMessage


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


class _NodesMarks:
    """Where this process's node marks keys that its queues cannot keep; it is not looked for before there is one."""

    async def get(self, key: Key) -> bytes | None:
        return await (await self._store()).get(key)

    async def set(self, key: Key, value: bytes, *, ttl: timedelta) -> None:
        await (await self._store()).set(key, value, ttl=ttl)

    async def set_if_absent(self, key: Key, value: bytes, *, ttl: timedelta) -> bytes | None:
        return await (await self._store()).set_if_absent(key, value, ttl=ttl)

    async def compare_and_set(self, key: Key, expected: bytes, value: bytes, *, ttl: timedelta) -> bool:
        return await (await self._store()).compare_and_set(key, expected, value, ttl=ttl)

    async def compare_and_delete(self, key: Key, expected: bytes) -> bool:
        return await (await self._store()).compare_and_delete(key, expected)

    async def _store(self) -> ConditionalKvStore:
        marks = get_federation().task_keys
        if marks is None:
            raise TypeError("a deduplication key needs queues that keep it, or BullMQ's or Bull's Redis; leave it out")
        return await marks.store()


_TASKS: Final = Tasks(_NodesQueue(), _NodesMarks(), deduplication_fallback="closed")

task = _TASKS.task
"""Declares the decorated function as a task of the application; see `Tasks.task`."""


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
    """Queue one run of the task, or return `duplicate` with the id of the job that has the key.

    With `session` both are part of its transaction: job and key exist from its commit on, if it commits. On BullMQ and
    Bull the key is a mark in their Redis, and only `throttle` is possible; see `Tasks` for what that cannot keep.

    Raises:
        Unsupported: a session, but the queues are not in its database; a mode or a key that the queue cannot keep.
        TypeError: nothing can keep the deduplication key; data that is not JSON.
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
    spec = joining_spec(
        get_federation(),
        task,
        data,
        deduplication_key=deduplication_key,
        deduplication_mode=deduplication_mode,
        delay=delay,
        ordering_key=ordering_key,
    )
    if not isinstance(session, AsyncSession):
        raise TypeError(
            f"federation.tasks.enqueue_task takes an AsyncSession, not {type(session).__name__}; synchronous sessions"
            " and connections go to federation.sync.enqueue_task"
        )
    return (await get_federation().tasks_queue.enqueue_many([spec], connection=session))[0]


def joining_spec(
    federation: Federation,
    task: Task,
    data: object,
    *,
    deduplication_key: str | None,
    deduplication_mode: DeduplicationMode,
    delay: timedelta,
    ordering_key: str | None,
) -> JobSpec:
    """Build one run of the task as a job of a transaction in the node's database.

    Raises:
        Unsupported: the queues are not in that database; a mode or a key that the queue cannot keep.
        TypeError, ValueError: as `enqueue_task`.
    """
    if not federation.queues_join_database:
        raise Unsupported(
            f"task {task.name!r}: the queues are not in the application's database; enqueue it without `session`, "
            "after the transaction"
        )
    return _TASKS.spec(
        task,
        data,
        deduplication_key=deduplication_key,
        deduplication_mode=deduplication_mode,
        delay=delay,
        ordering_key=ordering_key,
    )


def declared_tasks(modules: Sequence[str]) -> Mapping[str, Handler]:
    """Return the application's tasks as handlers: those of `modules`, which are imported, and those declared before.

    These modules may as well declare functions for activities that others send.

    Raises:
        ConfigurationError: lists every module that cannot be imported; or none of them declares a task.
    """
    problems = []
    for name in modules:
        try:
            import_module(name)
        except (ImportError, SyntaxError) as error:  # any other error is the application's own, and gets its traceback
            problems.append(f"FEDERATION_TASKS: {name} cannot be imported: {_told(error)}")
    handlers = _TASKS.handlers()
    if modules and not problems and not handlers and not HANDLERS:
        problems.append(
            f"FEDERATION_TASKS: {', '.join(modules)}: nothing there is declared with `federation.tasks.task`"
            " or `activitypub.on`"
        )
    if problems:
        raise ConfigurationError(problems)
    return handlers


def _told(error: ImportError | SyntaxError) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.msg} ({error.filename}, line {error.lineno})"
    return f"{error}; install the application, or add its directory to PYTHONPATH"
