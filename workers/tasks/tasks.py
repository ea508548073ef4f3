"""Named background tasks, on a queue of this package or any other, at most one at a time per deduplication key."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Concatenate, Final, Literal, ParamSpec, Self, TypeVar, Unpack, overload

from workers.background import background
from workers.checks import MAX_ATTEMPTS, as_duration, check_text, check_whole, reworded
from workers.crons import Missed
from workers.errors import Unsupported
from workers.foreground import log_ready, refuse_at_import, run_until_stopped, start_logging
from workers.kv.base import KvStore, encode_key, writes_conditionally
from workers.limits import Limit
from workers.middlewares import log_attempts
from workers.options import QueueOptions
from workers.queue import Queue
from workers.retry import BackoffFunction, RetryPolicy, check_policy, with_backoff
from workers.specs import Enqueued, JobSpec
from workers.storage.base import ANY_NAME, Storage
from workers.sync import SyncQueue
from workers.tasks.arguments import takes_only_job
from workers.tasks.declared import Task, Validate
from workers.tasks.enqueuing import EnqueuedTasks, Enqueuer
from workers.tasks.gathering import gathering, joining
from workers.tasks.in_memory import InMemory, queue_in_memory
from workers.tasks.kv_deduplication import KvDeduplication
from workers.tasks.options import CallOptions, TaskOptions
from workers.tasks.queue import QueueTasks, TaskMessage, TaskQueue, queues_of
from workers.tasks.runs import TaskRuns, Times, no_data, recur
from workers.tasks.typed import Declare, EnqueuedTask, TypedTask, typed_task
from workers.tasks.unique import Uniqueness, as_period, as_unique
from workers.worker.handlers import Handler, Job

P = ParamSpec("P")
R = TypeVar("R")

KV_PREFIX: Final = ("_federation", "task_deduplication")


class Tasks:
    """Tasks by name, and the queue they go to: a storage's URL, a storage, a `Queue`, or any `TaskQueue`.

    `app = Tasks("sqlite:///jobs.db")` is all that a program needs: `@app.task` declares, `await task.enqueue(...)` or
    `task.sync.enqueue(...)` enqueues, `app.run()`, `async with app` or `python -m workers run module:app` works. The
    tables of a file are made at the first use; in a server's database `python -m workers migrate module:app` makes
    them. A `Queue` has more settings: `Tasks(Queue(url, concurrency=50))`.

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
        queue: Queue | Storage | TaskQueue | str,
        kv: KvStore | None = None,
        *,
        deduplication_ttl: timedelta | float = timedelta(hours=1),
        deduplication_fallback: Literal["open", "closed"] = "open",
        kv_prefix: tuple[str, ...] = KV_PREFIX,
        retry: RetryPolicy | None = None,
    ) -> None:
        deduplication_ttl = as_period("deduplication_ttl", deduplication_ttl)
        check_policy("retry", retry)
        if deduplication_fallback not in ("open", "closed"):
            raise ValueError(f"deduplication_fallback is 'open' or 'closed', not {deduplication_fallback!r}")
        encode_key(kv_prefix)
        self._url = queue if isinstance(queue, str) else None
        self._own, tasks_queue = queues_of(queue, retry)
        self._enqueuer = Enqueuer(
            queue=tasks_queue,
            marks=KvDeduplication(kv, kv_prefix) if writes_conditionally(kv) else None,
            ttl=deduplication_ttl,
            is_closed=deduplication_fallback == "closed",
        )
        self._runs = TaskRuns(tasks_queue, retry or RetryPolicy())
        self._tasks: dict[str, Task] = {}
        self._served: dict[str, Handler] = {}
        self._memory: InMemory | None = None
        self._plain: SyncQueue | None = None
        self._entered: list[Queue] = []
        self._working: asyncio.AbstractEventLoop | None = None

    @property
    def queue(self) -> Queue:
        """The queue they go to.

        Raises:
            Unsupported: it is none of this package.
        """
        if self._own is None:
            raise Unsupported(
                "these tasks go to a queue that is no workers.Queue: its own consumers run them, and it has no results"
            )
        return self._own

    @property
    def sync(self) -> SyncQueue:
        """The queue for code without `async`: threads, scripts, Flask, Django; tasks have `task.sync.enqueue(...)`.

        Of tasks that were given a URL, but not `memory://`, it may be used beside the asynchronous calls. Otherwise it
        is the one queue that there is, for one of them.
        """
        if self._memory is not None or self._url is None or self.queue.storage.capabilities.processes == "one":
            return SyncQueue.over(self.queue)
        if self._plain is None:
            self._plain = SyncQueue(self._url, options=QueueOptions(limits=self.queue.limits))
        return self._plain

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
        backoff: BackoffFunction | None = None,
        lease: timedelta | None = None,
        timeout: timedelta | None = None,
        max_attempts: int | None = None,
        unique: Uniqueness | None = None,
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
        backoff: BackoffFunction | None = None,
        lease: timedelta | None = None,
        timeout: timedelta | None = None,
        max_attempts: int | None = None,
        unique: Uniqueness | None = None,
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

        `backoff` says how long to wait after a failed attempt, by its number and its error: see `RetryPolicy`. `unique`
        is a time in which the first of several enqueues with the same arguments counts, or True for as long as its job
        has not ended; see `Unique`.

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
            once = as_unique(f"task {chosen!r}: unique", unique)
            is_handler = isinstance(name, str) and takes_only_job(fn)
            make = partial(Handler, retry=with_backoff(retry, backoff), lease=lease, timeout=timeout)
            declared = (
                Task(chosen, make(fn), validate, max_attempts, key, once)
                if is_handler
                else typed_task(chosen, fn, make, validate, max_attempts, key, once, self)
            )
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
            recur(self._own, task, self._enqueuer.queue.serde.dumps(no_data(task)), times)
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
            raise reworded(error, f"task {name!r}: {error}") from None
        if self._own is None:
            raise Unsupported(f"task {name!r}: only a queue of this package keeps limits")
        for each in (self._own, self._plain):
            if each is not None:
                each.declare_limits({name: limit})

    def _check_declaration(self, name: str, validate: Validate | None, max_attempts: int | None) -> None:
        check_text("task name", name)
        if name == ANY_NAME or name in self._tasks:
            raise ValueError(f"task {name!r} is declared already" if name != ANY_NAME else "a task needs a name")
        if max_attempts is not None:
            check_whole(f"task {name!r}: max_attempts", max_attempts, 1, MAX_ATTEMPTS)
        if inspect.iscoroutinefunction(validate):
            raise TypeError(f"task {name!r}: validate is a plain function")

    def enqueue_task(
        self, task: Task, data: object, **options: Unpack[TaskOptions]
    ) -> Coroutine[object, object, Enqueued]:
        """Queue one run of the task, or return `duplicate` with the id of the job that has the key.

        It runs after the jobs with the ids `after` have ended; see `JobSpec`. With `connection` it is part of that
        transaction, see `Queue.enqueue`. `unique` replaces what the task was declared with. A `deduplication_key` of
        the caller's own is taken for `deduplication_ttl`, by `deduplication_mode`; where these are missing, as the
        task is unique.

        The steps are, in this order: what the queue and the store cannot do is refused, by the call itself, before
        anything is awaited; the data is validated and encoded; the key is claimed; the job is enqueued. So a failure
        leaves no mark; see `Tasks` for the exceptions.

        Raises:
            Unsupported: a mode that the queue cannot keep, or jobs to follow where it lets none wait, or a transaction.
            TypeError: no conditional writes while the fallback is `"closed"`; data the serde does not know.
            ValueError: data that cannot be encoded or that `validate` refuses, a bad key or delay, another's task.
            StorageUnavailable: the queue or the store did not answer.
        """
        return _only_one(self.enqueue_task_many(task, (data,), **options))

    def enqueue_task_many(
        self, task: Task, items: Iterable[object], **options: Unpack[TaskOptions]
    ) -> Coroutine[object, object, EnqueuedTasks]:
        """Queue one run for each item, as by `enqueue_task`.

        Every item is validated and encoded before the first is enqueued. Without items nothing happens, and no key is
        claimed. A batch of a unique task is compared as a whole.
        """
        self._check_ours(task)
        chosen = CallOptions(**options)
        self._enqueuer.refuse_unable(task, chosen)
        return self._enqueue(task, items, chosen)

    async def _enqueue(self, task: Task, items: Iterable[object], chosen: CallOptions) -> EnqueuedTasks:
        done = await self._enqueuer.enqueue(task, items, chosen)
        if self._memory is not None:
            await self._memory.note_enqueue()
        return done

    def spec(self, task: Task, data: object, **options: Unpack[TaskOptions]) -> JobSpec:
        """Return one run of the task as a job for `Queue.enqueue_many`, which may join the caller's transaction.

        The key is the one that `enqueue_task` would take. Specs of one call that share a key are queued or skipped
        together, like a batch.

        Raises:
            Unsupported: a deduplication key, but the queue keeps none: a mark is no part of a job.
            TypeError, ValueError: as `enqueue_task`; a `connection`, which goes to `enqueue_many`.
        """
        self._check_ours(task)
        return self._enqueuer.spec(task, data, CallOptions(**options))

    async def gather(
        self,
        specs: Iterable[JobSpec],
        *,
        then: TypedTask[Concatenate[Any, ...], R],
        connection: object | None = None,
    ) -> EnqueuedTask[R]:
        """Enqueue these jobs, and `then` with their results: `await app.gather([a.spec(1), b.spec(2)], then=c)`.

        It runs once all have completed, and fails if one of them does not. Its first argument is the list of what they
        gave, in their order; others need defaults. All are enqueued in one step, with a `connection` in that
        transaction. A result that is gone, or that its type refuses, fails it with an error that names the job.

        Raises:
            Unsupported: a queue of others, or one on which no job waits for others; a `connection` on one without
                transactions.
            TypeError, ValueError: a spec that is none, is there twice, follows jobs, or has a deduplication key; a task
                that takes no list. Nothing was stored.
            StorageUnavailable: the queue did not answer.
        """
        self._check_ours(then)
        done = await gathering(specs, then).enqueue(self.queue, connection)
        if self._memory is not None:
            await self._memory.note_enqueue()
        return EnqueuedTask(id=done.id, status=done.status, owner=self, arguments=then.arguments)

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
                raise reworded(error, f"task {name!r}: {error}") from None

    def handlers(self) -> Mapping[str, Handler]:
        """Return the tasks as handlers, for `Worker` or `Queue.execute`; other handlers may be added."""
        return {name: replace(task.handler, fn=joining(task)) for name, task in self._tasks.items()}

    @contextmanager
    def in_memory(self, *, eager: bool = False) -> Iterator[InMemory]:
        """Keep what is enqueued in memory while the block runs, for tests; `eager` runs it before the enqueue returns.

        Otherwise `await memory.drain()` runs it. Nothing reaches the queue, and no store has keys.
        """
        before = self._own, self._enqueuer
        queue = queue_in_memory()
        self._own, self._enqueuer = queue, replace(self._enqueuer, queue=QueueTasks(queue))
        self._memory = InMemory(queue, self.handlers, eager=eager)
        try:
            yield self._memory
        finally:
            self._own, self._enqueuer = before
            self._memory = None

    def working_queue(self) -> Queue:
        """Return `queue` with these tasks as its handlers, unless others were chosen.

        Raises:
            Unsupported: it is none of this package.
        """
        self._served.update(self.handlers())  # the queue reads it anew for each worker, with tasks declared since
        if not self.queue.has_handlers:
            self.queue.execute(self._served)
        return self.queue

    def run(self, *, concurrency: int | None = None, grace: timedelta | float | None = None) -> None:
        """Run a worker until SIGTERM or Ctrl-C, which lets tasks finish for `grace`; a second one does not.

        It logs to stderr, unless the program logs already. `python -m workers run module:app` does the same, and more.

        Raises:
            RuntimeError: it is not the main thread, which alone gets signals; an event loop runs in it; a command of
                `python -m workers` imports the module that calls this.
            ValueError: no task is declared.
            StorageError: the storage is not fit for use.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "run() works until a signal, which only the main thread gets; here, use `async with app:`"
            )
        if not self._tasks:
            raise ValueError("there is no task to run: declare one, `@app.task`, in a module that is imported before")
        refuse_at_import()
        if _running_loop() is not None:
            raise RuntimeError("run() has an event loop of its own; in a coroutine, use `async with app:`")
        start_logging()
        asyncio.run(self._work(concurrency, grace))

    async def _work(self, concurrency: int | None, grace: timedelta | float | None) -> None:
        queue, self._working = self.working_queue(), asyncio.get_running_loop()
        await queue.make_tables()
        around = [log_attempts]
        worker = queue.worker(concurrency=concurrency, grace=grace, observers=[log_ready], middlewares=around)
        await run_until_stopped([worker])

    async def __aenter__(self) -> Self:
        """Run a worker beside whatever the block does, which may enqueue to it; the outermost block's end stops it."""
        queue = self.working_queue()
        await queue.start()
        self._entered.append(queue)
        self._working = asyncio.get_running_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        queue = self._entered.pop()
        if queue not in self._entered:
            self._working = None
            await queue.stop()

    def refuse_to_block(self) -> None:
        """Raise `RuntimeError` where waiting would keep the tasks' own worker from working, in its event loop."""
        loop = _running_loop()
        if loop is not None and loop is self._working:
            raise RuntimeError("result() would block the event loop that runs these tasks; there, await enqueue()")

    def enqueue_plain(self, specs: Sequence[JobSpec], connection: object | None = None) -> list[Enqueued]:
        """Enqueue specs of tasks from code without `async`; see `workers.sync.Queue.enqueue_many`."""
        found = self.sync.enqueue_many(specs, connection=connection)
        if self._memory is not None:
            background.run(self._memory.note_enqueue)
            if not self._memory.is_draining:  # the test may go on in a loop of its own
                self.sync.close()
        return found

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

    def _check_ours(self, task: Task) -> None:
        if not hasattr(task, "handler"):
            raise TypeError(f"{task!r} is no task: declare it by `@app.task`")
        if self._tasks.get(task.name) is not task:
            raise ValueError(f"task {task.name!r} was declared elsewhere; enqueue it there")


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def _only_one(enqueuing: Coroutine[object, object, EnqueuedTasks]) -> Enqueued:
    batch = await enqueuing
    return Enqueued(id=batch.ids[0], status=batch.status)
