"""What a handler decides by an exception, where something wraps that, or carries it from one process to another."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest

from tests.workers.running import AT_ONCE, NEVER, Recorder, outcome, running
from workers import Job, WorkerOptions
from workers.errors import (
    ErrorInfo,
    JobFailedError,
    JobLockedError,
    LeaseLost,
    LossReason,
    MaxRetriesError,
    Retry,
    Snooze,
    StorageUnavailable,
    UnknownDependency,
    UnrecoverableError,
    WaitForChildren,
    WorkersError,
)
from workers.jobs import DROP
from workers.middlewares import log_attempts
from workers.storage.memory import MemoryStorage
from workers.testing import steps
from workers.worker import Worker
from workers.worker.events import WorkerEventKind as Kind
from workers.worker.failures import decision_in
from workers.worker.handlers import AttemptContext, Handler, HandlerFunction, Next

HOUR = timedelta(hours=1)


class Obsolete(UnrecoverableError):
    """One whose arguments are its own."""

    def __init__(self, url: str, *, by: int) -> None:
        super().__init__(f"nobody needs {url}", keep=DROP)
        self.by = by


async def in_a_group(error: BaseException) -> None:
    async def fail() -> None:
        raise error

    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(3600))
        group.create_task(fail())


async def in_a_groups_group(error: BaseException) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(in_a_group(error))


@pytest.mark.parametrize("wrapped", [in_a_group, in_a_groups_group])
async def test_a_decision_in_a_task_group_is_one(
    wrapped: Callable[[BaseException], object], caplog: pytest.LogCaptureFixture
) -> None:
    """It counts, and is told, as if the handler itself had raised it."""
    caplog.set_level("INFO", "workers.attempts")
    storage, recorder = MemoryStorage(), Recorder()
    errors = {"final": UnrecoverableError("gone"), "busy": Snooze(HOUR), "later": Retry("slow", delay=2 * HOUR)}

    async def work(job: Job) -> object:
        return await wrapped(errors[job.id])  # type: ignore[misc]  # both are coroutine functions

    for job_id in errors:
        await steps.enqueue(storage, steps.job(job_id))
    options = WorkerOptions(retry=AT_ONCE, middlewares=[log_attempts])
    async with running(Worker(storage, {"work": work}, observers=[recorder], options=options)):
        ended = await outcome(storage, "final")
        snoozed, failing = await recorder.seen(Kind.SNOOZED), await recorder.seen(Kind.FAILING)
    assert ended.error is not None
    assert (ended.error.type, ended.error.message) == ("UnrecoverableError", "gone")
    assert "in fail" in ended.error.stack
    assert (snoozed.delay, failing.delay) == (HOUR, 2 * HOUR)
    assert not [line for line in caplog.messages if "ExceptionGroup" in line]


async def test_a_middleware_may_have_a_task_group() -> None:
    """As one that does something beside the attempt."""
    storage, recorder = MemoryStorage(), Recorder()

    async def beside(context: AttemptContext, proceed: Next) -> object:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(asyncio.sleep(3600))
            result = await proceed()
            watching.cancel()
        return result

    async def busy(job: Job) -> None:
        raise Snooze(HOUR)

    await steps.enqueue(storage, steps.job("job", max_attempts=1))
    options = WorkerOptions(retry=NEVER, middlewares=[beside])
    async with running(Worker(storage, {"work": busy}, observers=[recorder], options=options)):
        assert (await recorder.seen(Kind.SNOOZED)).delay == HOUR


@pytest.mark.parametrize(
    ("raised", "decides"),
    [
        ([ValueError(), UnrecoverableError()], 1),
        ([Snooze(1), Retry(), Snooze(2)], 1),
        ([Snooze(1), Snooze(2)], 0),
        ([WaitForChildren()], 0),
        ([Snooze(1), ValueError()], None),
        ([WaitForChildren(), OSError()], None),
        ([asyncio.CancelledError(), KeyboardInterrupt()], None),
    ],
    ids=lambda value: "-".join(type(one).__name__ for one in value) if isinstance(value, list) else None,
)
def test_which_of_several_decides(raised: list[BaseException], decides: int | None) -> None:
    """A failure among them is one: only an `UnrecoverableError` says more."""
    group = BaseExceptionGroup("several", raised)
    assert decision_in(group) is (group if decides is None else raised[decides])
    error = OSError()
    assert decision_in(error) is error


def test_groups_may_be_nested_deeper_than_the_stack() -> None:
    final = UnrecoverableError()
    group = BaseExceptionGroup("innermost", [final])
    for _ in range(20_000):
        group = BaseExceptionGroup("outer", [group])
    assert decision_in(group) is final


@pytest.mark.parametrize("carried", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
@pytest.mark.parametrize(
    "error",
    [
        Retry("slow", at=datetime(2026, 1, 1, tzinfo=UTC), counted=False),
        Snooze(5, reason="busy"),
        UnrecoverableError("gone", keep=HOUR),
        Obsolete("a page", by=3),
        StorageUnavailable("away").naming(["a", "b"]),
        UnknownDependency("a", ["b", ("mail", "c")]),
        LeaseLost("a", LossReason.TAKEN),
        JobFailedError("a", None),
        MaxRetriesError("a", ErrorInfo(type="OSError", message="away")),
        JobLockedError(["a"], 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_travel_between_processes(error: WorkersError, carried: Callable[[WorkersError], WorkersError]) -> None:
    """As what a function in a pool of processes raises: one that cannot be read again breaks the whole pool."""
    arrived = carried(error)
    assert (type(arrived), arrived.args, vars(arrived)) == (type(error), error.args, vars(error))
    assert str(arrived) == str(error)


def gives(job: Job) -> Iterator[int]:
    yield 1


async def gives_later(job: Job) -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize("function", [gives, gives_later])
def test_a_generator_is_no_handler(function: HandlerFunction) -> None:
    """Its body would never run."""
    with pytest.raises(TypeError, match=f"does not `yield` it as {function.__qualname__} does"):
        Handler(function)
    with pytest.raises(TypeError, match="a handler returns what it gives"):
        Worker(MemoryStorage(), {"work": function})
