"""Tasks with arguments: enqueued with the call of a function, which a type checker checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, Protocol, TypeVar, Unpack, cast, overload

from workers.checks import check_function, new_id, reworded
from workers.jobs import EnqueueStatus
from workers.queue import Queue
from workers.specs import Enqueued, JobSpec
from workers.sync import SyncQueue
from workers.tasks.arguments import Arguments
from workers.tasks.declared import Task, Validate
from workers.tasks.options import TaskOptions
from workers.tasks.unique import Unique
from workers.worker.attempt import invoke
from workers.worker.handlers import Handler, HandlerFunction, Job

P = ParamSpec("P")
R = TypeVar("R")

_ELSEWHERE: Final = {
    "delay": "enqueue(...)",
    "apply_async": "options(...).enqueue(...)",
    "send": "enqueue(...)",
    "s": "spec(...)",
    "si": "spec(...)",
    "get": "enqueue(...), whose value has result()",
}
"""What other queues call it; for who comes from there."""


class Owner(Protocol):
    """The `Tasks` that a task was declared with."""

    @property
    def queue(self) -> Queue: ...

    @property
    def sync(self) -> SyncQueue: ...

    async def enqueue_task(self, task: Task, data: object, **options: Unpack[TaskOptions]) -> Enqueued: ...

    def spec(self, task: Task, data: object, **options: Unpack[TaskOptions]) -> JobSpec: ...

    def enqueue_plain(self, specs: Sequence[JobSpec], connection: object | None) -> list[Enqueued]: ...

    def refuse_to_block(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EnqueuedTask(Generic[R]):
    """An enqueued run of a task; with the status `duplicate`, that of the job which has the deduplication key."""

    id: str
    status: EnqueueStatus
    owner: Owner = field(repr=False)
    arguments: Arguments = field(repr=False)

    async def result(self, timeout: timedelta | float = timedelta(seconds=30)) -> R:
        """Wait for the end of the job, and return what its function returned.

        Raises:
            JobFailedError, JobCancelledError, JobTimeoutError, JobGoneError: see `Queue.enqueue_and_wait`.
            ValueError: the job has completed, and its result is not what the function's annotation says.
            Unsupported: the tasks' queue is none of this package, and has no results.
        """
        result = await self.owner.queue.wait_for_job_chain_completion(self.id, timeout)
        return cast(R, loaded(self.arguments, self.id, result))


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncEnqueuedTask(Generic[R]):
    """The same, for code without `async`."""

    id: str
    status: EnqueueStatus
    owner: Owner = field(repr=False)
    arguments: Arguments = field(repr=False)

    def result(self, timeout: timedelta | float = timedelta(seconds=30)) -> R:
        """See `EnqueuedTask.result`; the calling thread waits.

        Raises:
            RuntimeError: in that thread the tasks' own worker runs, and would have to wait as well.
        """
        self.owner.refuse_to_block()
        return cast(R, loaded(self.arguments, self.id, self.owner.sync.wait_for_job_chain_completion(self.id, timeout)))


def loaded(arguments: Arguments, job_id: str, result: object) -> object:
    """Return a job's result as its function's annotation says; raises `ValueError` where it is something else."""
    try:
        return arguments.loaded(result)
    except ValueError as error:
        problem = f"job {job_id!r} has completed with a result that its annotation does not allow: {error}"
    raise ValueError(problem)


@dataclass(frozen=True, slots=True, eq=False)
class TypedTask(Task, Generic[P, R]):
    """A task whose function has annotated arguments; `@tasks.task` makes it. Its payload has them by name."""

    owner: Owner
    arguments: Arguments

    def completed(self, data: object) -> object:
        """Return the data with the defaults of the function's arguments."""
        return self.arguments.completed(data)

    @property
    def says_why(self) -> bool:
        """Whether a refusal may be shown: it names the argument, and does not quote it."""
        return True

    @property
    def fn(self) -> HandlerFunction:
        """The function as it was declared."""
        return cast(HandlerFunction, self.arguments.function)

    @overload
    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> EnqueuedTask[R]: ...

    @overload
    async def enqueue(self, *args: Any, connection: object, **kwargs: Any) -> EnqueuedTask[R]: ...

    async def enqueue(self, *args: Any, **kwargs: Any) -> EnqueuedTask[R]:
        """Check the arguments, and queue one run with them; `connection` joins that transaction, see `Queue.enqueue`.

        A type checker takes any arguments beside a `connection`; `options(connection=...).enqueue(...)` lets it check
        them. If the function has an argument of that name, it is that argument.

        Raises:
            TypeError, ValueError: arguments that do not fit; nothing was stored.
            StorageError: the connection is one of another database.
            StorageUnavailable: the queue did not answer.
        """
        return await self._call(kwargs).enqueue(*args, **kwargs)

    @property
    def sync(self) -> SyncTask[P, R]:
        """The same for code without `async`: `welcome.sync.enqueue(1, connection=session)`."""
        return SyncTask(self, {})

    if not TYPE_CHECKING:  # it would take any name for one that is there

        def __getattr__(self, name: str) -> object:
            own = object.__getattribute__(self, "name")  # a copy that is being made has none yet
            hint = f": here it is {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
            raise AttributeError(f"task {own!r} has no {name!r}{hint}")

    def _call(self, kwargs: dict[str, Any]) -> TaskCall[P, R]:  # Any: the arguments of any function
        return TaskCall(self, taken_from(kwargs, self.arguments))

    def options(self, **options: Unpack[TaskOptions]) -> TaskCall[P, R]:
        """Return the same with these options: `await digest.options(delay=timedelta(hours=1)).enqueue(user_id=3)`."""
        return TaskCall(self, options)

    def spec(self, *args: P.args, **kwargs: P.kwargs) -> JobSpec:
        """See `TaskCall.spec`."""
        return TaskCall(self, {}).spec(*args, **kwargs)

    async def run(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function here and now with checked arguments, as a worker would, but without a queue or a job.

        Raises:
            TypeError, ValueError: arguments that do not fit.
            Exception: whatever the function raises.
        """
        payload = self.arguments.decoded(self.arguments.encoded(*args, **kwargs))
        job = Job(id=new_id(), name=self.name, payload=payload, attempt=1, max_attempts=1, created_at=datetime.now(UTC))
        result = await invoke(self.handler.fn, job)
        return cast(R, self.arguments.loaded(result))


class TaskCall(Generic[P, R]):
    """A typed task with the options of its next runs."""

    def __init__(self, task: TypedTask[P, R], options: TaskOptions) -> None:
        self._task = task
        self._options = options

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> EnqueuedTask[R]:
        """See `TypedTask.enqueue`."""
        task = self._task
        done = await task.owner.enqueue_task(task, encoded(task, *args, **kwargs), **self._options)
        return EnqueuedTask(id=done.id, status=done.status, owner=task.owner, arguments=task.arguments)

    @property
    def sync(self) -> SyncTask[P, R]:
        """The same for code without `async`."""
        return SyncTask(self._task, self._options)

    def spec(self, *args: P.args, **kwargs: P.kwargs) -> JobSpec:
        """Return one run as a job for `Queue.enqueue_many`, which may join the caller's transaction.

        Raises:
            TypeError, ValueError, Unsupported: see `Tasks.spec`.
        """
        return self._task.owner.spec(self._task, encoded(self._task, *args, **kwargs), **self._options)


class SyncTask(Generic[P, R]):
    """A typed task for code without `async`, from any thread; see `workers.sync`."""

    def __init__(self, task: TypedTask[P, R], options: TaskOptions) -> None:
        self._task = task
        self._options = options

    @overload
    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> SyncEnqueuedTask[R]: ...

    @overload
    def enqueue(self, *args: Any, connection: object, **kwargs: Any) -> SyncEnqueuedTask[R]: ...

    def enqueue(self, *args: Any, **kwargs: Any) -> SyncEnqueuedTask[R]:
        """See `TypedTask.enqueue`; `connection` is one that `workers.sync.Queue.enqueue` takes.

        Raises:
            Unsupported: a deduplication key on a queue that keeps none.
        """
        task = self._task
        options = TaskOptions(**{**self._options, **taken_from(kwargs, task.arguments)})
        connection = options.pop("connection", None)
        spec = task.owner.spec(task, encoded(task, *args, **kwargs), **options)
        [done] = task.owner.enqueue_plain([spec], connection)
        return SyncEnqueuedTask(id=done.id, status=done.status, owner=task.owner, arguments=task.arguments)


def taken_from(kwargs: dict[str, Any], arguments: Arguments) -> TaskOptions:  # Any: the arguments of any function
    """Take the caller's `connection` out of the arguments, unless it is one of them."""
    if "connection" not in kwargs or "connection" in arguments.names:
        return {}
    return {"connection": kwargs.pop("connection")}


def encoded(task: TypedTask[P, R], *args: P.args, **kwargs: P.kwargs) -> dict[str, object]:
    """Return the arguments as the data of a run; raises `TypeError` or `ValueError` for those that do not fit."""
    problem: Exception
    try:
        return task.arguments.encoded(*args, **kwargs)
    except (TypeError, ValueError) as error:
        problem = reworded(error, f"task {task.name!r}: {error}")
    raise problem  # not chained: what a validator raises may quote the arguments


def as_handler(arguments: Arguments) -> HandlerFunction:
    """Return the function as one of a job whose payload has the decoded arguments by name."""
    function: Any = arguments.function  # Any: its own arguments, which were checked

    def given(job: Job) -> tuple[list[Job], dict[str, object]]:
        payload = job.payload
        assert isinstance(payload, dict)
        return [job] if arguments.takes_job else [], payload

    if not inspect.iscoroutinefunction(function):

        def run(job: Job) -> object:
            before, named = given(job)
            return arguments.dump_result(function(*before, **named))

        return run

    async def run_async(job: Job) -> object:
        before, named = given(job)
        work: Coroutine[object, object, object] = function(*before, **named)
        return arguments.dump_result(await work)

    return run_async


def typed_task(
    name: str,
    fn: Callable[..., Any],  # Any: whatever its author's function takes and returns
    make: Callable[[HandlerFunction], Handler],
    validate: Validate | None,
    max_attempts: int | None,
    key: str | None,
    unique: Unique | None,
    owner: Owner,
) -> Task:
    """Return the function as a task of `owner`; `make` makes its handler.

    Raises:
        TypeError: an argument that cannot be checked, a `validate` beside its annotations, or a class.
        ValueError: a key, of its limit or of what is unique, that is none of its arguments.
    """
    if isinstance(fn, type):
        raise TypeError(f"task {name!r}: a task is a function, or a coroutine function, not a class")
    if validate is not None:
        raise TypeError(f"task {name!r}: its annotations say what its arguments are; leave `validate` out")
    try:
        check_function("a task", fn)
        arguments = Arguments(fn)
    except TypeError as error:
        raise TypeError(f"task {name!r}: {error}") from None
    task: TypedTask[..., object] = TypedTask(
        name, make(as_handler(arguments)), arguments.decoded, max_attempts, key, unique, owner, arguments
    )
    for each in (() if key is None else (key,)) + tuple(() if unique is None else unique.keys):
        if each not in arguments.names:
            known = ", ".join(arguments.names) or "none"
            raise ValueError(f"task {name!r}: its key {each!r} is none of its arguments, which are: {known}")
    return task


class Declare(Protocol):
    """Declares the decorated function as a task; see `Tasks.task`."""

    @overload
    def __call__(self, fn: Callable[[Job], object], /) -> Task: ...

    @overload
    def __call__(  # type: ignore[overload-cannot-match] # mypy leaves what P stands for out of the comparison
        self, fn: Callable[Concatenate[Job, P], Coroutine[Any, Any, R]], /
    ) -> TypedTask[P, R]: ...

    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> TypedTask[P, R]: ...

    @overload
    def __call__(  # type: ignore[overload-cannot-match] # likewise
        self, fn: Callable[Concatenate[Job, P], R], /
    ) -> TypedTask[P, R]: ...

    @overload
    def __call__(self, fn: Callable[P, R], /) -> TypedTask[P, R]: ...
