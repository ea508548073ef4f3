"""Named background tasks, on a queue of this package or any other, at most one at a time per deduplication key."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Concatenate, Final, Literal, ParamSpec, TypeAlias, TypeVar, Unpack, overload

from workers.checks import MAX_ATTEMPTS, MAX_DELAY, as_duration, as_positive, check_text, new_id
from workers.crons import Missed
from workers.deduplication import Deduplication, DeduplicationMode
from workers.errors import Unsupported
from workers.jobs import AfterFailure, EnqueueStatus, JobRef
from workers.jobs.job import as_jobs
from workers.kv.base import KvStore, encode_key, writes_conditionally
from workers.limits import Limit
from workers.queue import Queue
from workers.retry import RetryPolicy, check_policy
from workers.serde import Encoded
from workers.slices import in_slices
from workers.specs import Enqueued, JobSpec
from workers.storage.base import ANY_NAME
from workers.tasks.arguments import takes_only_job
from workers.tasks.declared import Task, Validate, validated
from workers.tasks.in_memory import InMemory, queue_in_memory
from workers.tasks.kv_deduplication import KvDeduplication
from workers.tasks.queue import EnqueueOptions, QueueTasks, TaskMessage, TaskQueue
from workers.tasks.runs import TaskRuns, Times, no_data, recur
from workers.tasks.typed import Declare, TaskOptions, TypedTask, typed_task
from workers.worker.handlers import Handler, Job

P = ParamSpec("P")
R = TypeVar("R")

KV_PREFIX: Final = ("_federation", "task_deduplication")

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnqueuedTasks:
    """The outcome of a batch: the ids of its jobs; or `duplicate`, with the id of the first job that has the key."""

    status: EnqueueStatus
    ids: tuple[str, ...]


class Tasks:
    """Tasks by name, and the queue they go to: a `Queue`, or any `TaskQueue`.

    A `deduplication_key` belongs to its task: of several enqueues with one key, all but the first are skipped for
    `deduplication_ttl` from when the job becomes due, or as its `DeduplicationMode` says. A queue that deduplicates
    natively does it by itself, in each mode. For any other queue a mark in `kv`, under `kv_prefix`, does it, by
    `throttle` alone. What a mark cannot do:

    - A process that dies between the mark and the enqueue, or a store that fails when a failed enqueue is undone,
      blocks the key until its time is over.
    - An enqueue that failed without an answer may have stored its job; enqueueing again then makes a second one.
    - A mark knows nothing of its job: it outlives one that is cancelled, fails or finishes early, and is gone before
      one that waits or runs longer.
    - It is not part of anybody's transaction.

    Where `kv` is missing, or cannot write conditionally, `deduplication_fallback` decides: `"open"` enqueues without
    deduplication and says so at debug level, `"closed"` raises `TypeError`. Two `Tasks` with tasks of the same names
    on different queues need different prefixes in one store.

    Raises:
        ValueError, TypeError: a setting of another kind or out of its range, by its name.
    """

    def __init__(
        self,
        queue: Queue | TaskQueue,
        kv: KvStore | None = None,
        *,
        deduplication_ttl: timedelta | float = timedelta(hours=1),
        deduplication_fallback: Literal["open", "closed"] = "open",
        kv_prefix: tuple[str, ...] = KV_PREFIX,
        retry: RetryPolicy | None = None,
    ) -> None:
        deduplication_ttl = as_positive("deduplication_ttl", deduplication_ttl)
        if deduplication_ttl > MAX_DELAY:
            raise ValueError(f"deduplication_ttl is up to 100 years, not {deduplication_ttl!r}")
        check_policy("retry", retry)
        if deduplication_fallback not in ("open", "closed"):
            raise ValueError(f"deduplication_fallback is 'open' or 'closed', not {deduplication_fallback!r}")
        encode_key(kv_prefix)
        self.queue = queue if isinstance(queue, Queue) else None
        """The queue they go to, if it is one of this package."""
        self._queue = QueueTasks(queue) if isinstance(queue, Queue) else queue
        self._marks = KvDeduplication(kv, kv_prefix) if writes_conditionally(kv) else None
        self._ttl = deduplication_ttl
        self._closed = deduplication_fallback == "closed"
        self._runs = TaskRuns(self._queue, retry or RetryPolicy())
        self._tasks: dict[str, Task] = {}
        self._memory: InMemory | None = None

    @overload
    def task(self, name: Callable[Concatenate[Job, P], Coroutine[Any, Any, R]], /) -> TypedTask[P, R]: ...

    @overload
    def task(self, name: Callable[P, Coroutine[Any, Any, R]], /) -> TypedTask[P, R]: ...

    @overload
    def task(self, name: Callable[Concatenate[Job, P], R], /) -> TypedTask[P, R]: ...

    @overload
    def task(self, name: Callable[P, R], /) -> TypedTask[P, R]: ...

    @overload
    def task(
        self,
        name: str | None = None,
        *,
        validate: Validate | None = None,
        retry: RetryPolicy | None = None,
        lease: timedelta | None = None,
        timeout: timedelta | None = None,
        max_attempts: int | None = None,
        rate: str | None = None,
        concurrency_per_key: int | None = None,
        key: str | None = None,
    ) -> Declare: ...

    def task(
        self,
        name: str | Callable[..., Any] | None = None,
        *,
        validate: Validate | None = None,
        retry: RetryPolicy | None = None,
        lease: timedelta | None = None,
        timeout: timedelta | None = None,
        max_attempts: int | None = None,
        rate: str | None = None,
        concurrency_per_key: int | None = None,
        key: str | None = None,
    ) -> Any:  # Any: see the overloads
        """Declare the decorated function as a task: `@tasks.task`, or `@tasks.task("name", max_attempts=5)`.

        A function with annotated arguments becomes a `TypedTask`: its arguments are checked at enqueue, and before each
        run, and a first parameter `Job` is the job. Without a name it gets the function's. A handler, `async def (job)
        -> result` or a plain one, with a name becomes a `Task`, whose payload is any data. `validate` is called with
        the data at enqueue, so that bad data is refused there. It is called again with the decoded data before each
        run, and what it returns then is `job.payload`. `retry`, `lease` and `timeout` are as for `Handler`. A
        `max_attempts` of None means the queue's, or 3 where the queue has none.

        `rate` (`"10/s"`) and `concurrency_per_key` limit the task: so many runs start in a time, and go on at once.
        With `key`, the name of an argument or of an entry of the data, they count for each of its values alone.

        Raises:
            Unsupported: a limit on a queue that keeps none, or none of tasks.
            ValueError: a rate or a concurrency that no `Limit` has, or a key without them; the name is taken, `"*"` or
                not 1 to 512 bytes; a setting is out of its range.
            TypeError: `validate` is a coroutine function, or is given for a function that checks its own arguments; an
                argument without annotation.
        """

        def declare(fn: Callable[..., Any]) -> Task:
            chosen = fn.__name__ if callable(name) or name is None else name
            self._check_declaration(chosen, validate, max_attempts)
            is_handler = isinstance(name, str) and takes_only_job(fn)
            make = partial(Handler, retry=retry, lease=lease, timeout=timeout)
            declared = (
                Task(chosen, make(fn), validate, max_attempts, key)
                if is_handler
                else typed_task(chosen, fn, make, validate, max_attempts, key, self)
            )
            _check_key(declared)
            self._declare_limit(chosen, rate, concurrency_per_key, key)
            self._tasks[chosen] = declared
            return declared

        return declare(name) if callable(name) else declare

    def cron(
        self,
        pattern: str | None = None,
        *,
        every: timedelta | float | None = None,
        timezone: str = "UTC",
        version: int = 1,
        missed: Missed = Missed.ONCE,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        lease: timedelta | None = None,
        timeout: timedelta | None = None,
        max_attempts: int | None = None,
    ) -> Declare:
        """Declare the decorated function as a task that recurs: `@tasks.cron("0 3 * * *", timezone="Europe/Berlin")`.

        Its runs have no arguments. Workers of the queue store the times when they start, and from then on any of them
        enqueues one job for each time, see `workers.crons.Cron`; the rest is as for `task`. It recurs until it is
        removed (`queue.crons.remove`, `python -m workers crons`): to delete the function is not enough.

        Raises:
            Unsupported: the queue keeps nothing that recurs, or not in this way.
            ValueError: neither a pattern nor `every`, or both, or bad ones; another setting is out of its range.
            TypeError: the function has an argument without a default; a bare `@tasks.cron`.
        """

        if callable(pattern):
            raise TypeError(f"a task that recurs has its times: @tasks.cron('0 3 * * *') above {pattern.__name__}")

        def declare(fn: Callable[..., Any]) -> Any:  # Any: see `Declare`
            own: Callable[..., Task] = self.task(
                name or fn.__name__, retry=retry, lease=lease, timeout=timeout, max_attempts=max_attempts
            )
            task = own(fn)
            period = None if every is None else as_duration("every", every)
            times = Times(pattern=pattern, every=period, timezone=timezone, version=version, missed=missed)
            recur(self.queue, task, self._queue.serde.dumps(no_data(task)), times)
            return task

        return declare

    def _declare_limit(self, name: str, rate: str | None, concurrency: int | None, key: str | None) -> None:
        if rate is None and concurrency is None:
            if key is not None:
                raise ValueError(f"task {name!r}: a key needs a rate or concurrency_per_key beside it")
            return
        try:
            limit = Limit(rate, concurrency=concurrency)
        except (ValueError, TypeError) as error:
            raise type(error)(f"task {name!r}: {error}") from None
        if self.queue is None:
            raise Unsupported(f"task {name!r}: only a queue of this package keeps limits")
        self.queue.declare_limits({name: limit})

    def _check_declaration(self, name: str, validate: Validate | None, max_attempts: int | None) -> None:
        check_text("task name", name)
        if name == ANY_NAME or name in self._tasks:
            raise ValueError(f"task {name!r} is declared already" if name != ANY_NAME else "a task needs a name")
        if max_attempts is not None and not 1 <= max_attempts <= MAX_ATTEMPTS:
            raise ValueError(f"task {name!r}: max_attempts must be from 1 to {MAX_ATTEMPTS}, not {max_attempts}")
        if inspect.iscoroutinefunction(validate):
            raise TypeError(f"task {name!r}: validate is a plain function")

    def enqueue_task(
        self, task: Task, data: object, **options: Unpack[TaskOptions]
    ) -> Coroutine[object, object, Enqueued]:
        """Queue one run of the task, or return `duplicate` with the id of the job that has the key.

        It runs after the jobs with the ids `after` have ended; see `JobSpec`.

        The steps are, in this order: what the queue and the store cannot do is refused, by the call itself, before
        anything is awaited; the data is validated and encoded; the key is claimed; the job is enqueued. So a failure
        leaves no mark; see `Tasks` for the exceptions.

        Raises:
            Unsupported: a mode that the queue cannot keep, or jobs to follow where it lets none wait.
            TypeError: no conditional writes while the fallback is `"closed"`; data the serde does not know.
            ValueError: data that cannot be encoded or that `validate` refuses, a bad key or delay, another's task.
            StorageUnavailable: the queue or the store did not answer.
        """
        return _only_one(self.enqueue_task_many(task, (data,), **options))

    def enqueue_task_many(
        self,
        task: Task,
        items: Iterable[object],
        *,
        deduplication_key: str | None = None,
        deduplication_mode: DeduplicationMode = DeduplicationMode.THROTTLE,
        delay: timedelta | float = timedelta(0),
        priority: int = 0,
        ordering_key: str | None = None,
        after: Iterable[str | JobRef] = (),
        after_failure: AfterFailure = AfterFailure.FAIL,
    ) -> Coroutine[object, object, EnqueuedTasks]:
        """Queue one run for each item, as by `enqueue_task`.

        Every item is validated and encoded before the first is enqueued. Without items nothing happens, and no key is
        claimed.
        """
        self._check_ours(task)
        mode = DeduplicationMode(deduplication_mode)
        self._refuse_unable(task, deduplication_key, mode)
        after = as_jobs(after)
        if after and not getattr(self._queue, "native_dependencies", False):  # a foreign queue need not know of it
            raise Unsupported(f"task {task.name!r}: its queue lets no job follow others; leave `after` out")
        if priority and not getattr(self._queue, "native_priorities", False):
            raise Unsupported(f"task {task.name!r}: its queue has no priorities; leave `priority` out")
        options = EnqueueOptions(
            delay=as_duration("delay", delay),
            priority=priority,
            ordering_key=ordering_key,
            after=after,
            after_failure=after_failure,
        )
        scope = None if deduplication_key is None else _scope(task, deduplication_key)
        return self._enqueue(task, items, options, scope, mode)

    async def _enqueue(
        self,
        task: Task,
        items: Iterable[object],
        options: EnqueueOptions,
        scope: _Scope | None,
        mode: DeduplicationMode,
    ) -> EnqueuedTasks:
        messages = await in_slices(lambda data: self._message(task, data, options.ordering_key), items)
        if not messages:
            return EnqueuedTasks(status=EnqueueStatus.QUEUED, ids=())
        existing = await self._dispatch(messages, options, scope, mode)
        if self._memory is not None:
            await self._memory.note_enqueue()
        if existing is not None:
            return EnqueuedTasks(status=EnqueueStatus.DUPLICATE, ids=(existing,))
        return EnqueuedTasks(status=EnqueueStatus.QUEUED, ids=tuple(message.id for message in messages))

    def spec(
        self,
        task: Task,
        data: object,
        *,
        deduplication_key: str | None = None,
        deduplication_mode: DeduplicationMode = DeduplicationMode.THROTTLE,
        delay: timedelta | float = timedelta(0),
        priority: int = 0,
        ordering_key: str | None = None,
        after: Iterable[str | JobRef] = (),
        after_failure: AfterFailure = AfterFailure.FAIL,
    ) -> JobSpec:
        """Return one run of the task as a job for `Queue.enqueue_many`, which may join the caller's transaction.

        The key is the one that `enqueue_task` would take. Specs of one call that share a key are queued or skipped
        together, like a batch.

        Raises:
            Unsupported: a deduplication key, but the queue keeps none: a mark is no part of a job.
            TypeError, ValueError: as `enqueue_task`.
        """
        self._check_ours(task)
        mode = DeduplicationMode(deduplication_mode)
        if deduplication_key is not None and not self._queue.native_deduplication:
            raise Unsupported(
                f"task {task.name!r}: a deduplication key in a job needs a queue that deduplicates natively; "
                "leave it out, or use enqueue_task without a transaction"
            )
        deduplication = None if deduplication_key is None else self._deduplication(task, deduplication_key, mode)
        message = self._message(task, data, ordering_key)
        return JobSpec(
            name=task.name,
            payload=Encoded(message.payload),
            limit_key=message.limit_key,
            delay=delay,
            priority=priority,
            max_attempts=task.max_attempts,
            ordering_key=ordering_key,
            deduplication=deduplication,
            after=after,
            after_failure=after_failure,
        )

    def check(self, name: str, data: object) -> None:
        """Check decoded data for a run of the task of that name, if there is one.

        Raises:
            TypeError, ValueError: they do not fit.
        """
        task = self._tasks.get(name)
        if task is not None and task.validate is not None:
            try:
                task.validate(data)
            except (TypeError, ValueError) as error:
                raise type(error)(f"task {name!r}: {error}") from None

    def handlers(self) -> Mapping[str, Handler]:
        """Return the tasks as handlers, for `Worker` or `Queue.execute`; other handlers may be added."""
        return {name: replace(task.handler, fn=validated(task)) for name, task in self._tasks.items()}

    @contextmanager
    def in_memory(self, *, eager: bool = False) -> Iterator[InMemory]:
        """Keep what is enqueued in memory while the block runs, for tests; `eager` runs it before the enqueue returns.

        Otherwise `await memory.drain()` runs it. Nothing reaches the queue, and no store has keys.
        """
        before = self.queue, self._queue
        queue = queue_in_memory()
        self.queue, self._queue = queue, QueueTasks(queue)
        self._memory = InMemory(queue, self.handlers, eager=eager)
        try:
            yield self._memory
        finally:
            self.queue, self._queue = before
            self._memory = None

    def working_queue(self) -> Queue | None:
        """Return `queue` with these tasks as its handlers, unless others were chosen; None for another's queue."""
        if self.queue is not None and not self.queue.has_handlers:
            self.queue.execute(self.handlers())
        return self.queue

    async def process(self, message: TaskMessage) -> None:
        """Run the task of a foreign queue's message; for that queue's consumer to call.

        With `native_retrial` an exception of the task is raised, and the queue decides. Otherwise the task is enqueued
        again after its back-off, and logged as failed when no attempt is left; see `workers.errors` for what a task may
        raise.

        Raises:
            StorageUnavailable: it could not be enqueued again.
            CancelledError: nothing is known about the run.
        """
        await self._runs.run(message, self.handlers())

    def _deduplication(self, task: Task, key: str, mode: DeduplicationMode) -> Deduplication:
        ttl = None if mode is DeduplicationMode.SIMPLE else self._ttl
        return Deduplication(key=encode_key(_scope(task, key)), mode=mode, ttl=ttl)

    def _check_ours(self, task: Task) -> None:
        if self._tasks.get(task.name) is not task:
            raise ValueError(f"task {task.name!r} was declared elsewhere; enqueue it there")

    def _refuse_unable(self, task: Task, key: str | None, mode: DeduplicationMode) -> None:
        if key is None or self._queue.native_deduplication:
            return
        if mode is not DeduplicationMode.THROTTLE:
            raise Unsupported(f"task {task.name!r}: deduplication by {mode.value} needs a queue that does it natively")
        if self._marks is None and self._closed:
            raise TypeError(
                f"task {task.name!r}: a deduplication key needs a queue that deduplicates natively, or a KV store "
                "with set_if_absent, compare_and_set and compare_and_delete"
            )

    def _message(self, task: Task, data: object, ordering_key: str | None) -> TaskMessage:
        if task.validate is not None:
            task.validate(data)
        return TaskMessage(
            id=new_id(),
            task=task.name,
            payload=self._queue.serde.dumps(data),
            max_attempts=task.max_attempts,
            ordering_key=ordering_key,
            limit_key=task.limit_key(data),
        )

    async def _dispatch(
        self, messages: list[TaskMessage], options: EnqueueOptions, scope: _Scope | None, mode: DeduplicationMode
    ) -> str | None:
        """Enqueue the messages and return None, or return the id of the job that has the key already."""
        if scope is None:
            return await self._queue.enqueue(messages, options)
        ttl = options.delay + self._ttl
        if self._queue.native_deduplication:
            kept = None if mode is DeduplicationMode.SIMPLE else ttl
            native = replace(
                options, deduplication_key=encode_key(scope), deduplication_mode=mode, deduplication_ttl=kept
            )
            return await self._queue.enqueue(messages, native)
        enqueue = partial(self._queue.enqueue, messages, options)
        if self._marks is None:
            _LOG.debug("task %r is enqueued without deduplication: no store writes conditionally", messages[0].task)
            return await enqueue()
        return await self._marks.once(scope, messages[0].id, ttl, enqueue)


_Scope: TypeAlias = tuple[str, str]


async def _only_one(enqueuing: Coroutine[object, object, EnqueuedTasks]) -> Enqueued:
    batch = await enqueuing
    return Enqueued(id=batch.ids[0], status=batch.status)


def _check_key(task: Task) -> None:
    if task.key is not None and isinstance(task, TypedTask) and task.key not in task.arguments.names:
        known = ", ".join(task.arguments.names) or "none"
        raise ValueError(f"task {task.name!r}: its key {task.key!r} is none of its arguments, which are: {known}")


def _scope(task: Task, key: str) -> _Scope:
    """Return the key as one of its task alone."""
    if not isinstance(key, str):
        raise TypeError(f"task {task.name!r}: a deduplication key is a text, not {type(key).__name__}")
    check_text("deduplication key", key)
    scope = (task.name, key)
    check_text("deduplication key, its task's name and escapes included,", encode_key(scope))
    return scope
