"""What a handler may be, what it is given, and what wraps it."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest

from tests.workers.running import AT_ONCE, Recorder, done, outcome, running
from workers import WorkerOptions
from workers.clock import ManualClock
from workers.errors import LossReason, UnknownJobError
from workers.jobs import DROP, OutcomeKind
from workers.storage.memory import MemoryStorage
from workers.testing import steps
from workers.testing.steps import PATIENCE
from workers.worker import Worker
from workers.worker.events import WorkerEventKind
from workers.worker.handlers import (
    AttemptContext,
    Handler,
    HandlerFunction,
    HandlerTable,
    Job,
    Middleware,
    Next,
    Signal,
)
from workers.worker.handlers import SignalReason as Reason

WHO: contextvars.ContextVar[str] = contextvars.ContextVar("WHO", default="nobody")


async def result_of(handler: HandlerFunction, *middlewares: Middleware) -> bytes:
    """What a worker stores for one job with the payload `["in"]`, which must complete."""
    storage = MemoryStorage()
    await steps.enqueue(storage, steps.job("job", payload=b'["in"]', max_attempts=2))
    async with running(
        Worker(storage, {"work": handler}, options=WorkerOptions(middlewares=middlewares, worker_id="w1"))
    ):
        ended = await outcome(storage, "job")
    assert ended.kind is OutcomeKind.COMPLETED, ended.error
    assert ended.result is not None
    return ended.result


async def _async(prefix: str, job: Job) -> list[object]:
    return [prefix, job.payload]


def _plain(prefix: str, job: Job) -> list[object]:
    return [prefix, job.payload]


class _AsyncCallable:
    async def __call__(self, job: Job) -> list[object]:
        return ["p", job.payload]

    async def method(self, job: Job) -> list[object]:
        return ["p", job.payload]


class _PlainCallable:
    def __call__(self, job: Job) -> list[object]:
        return ["p", job.payload]


@pytest.mark.parametrize(
    "handler",
    [
        partial(_async, "p"),
        partial(_plain, "p"),
        partial(partial(_async), "p"),
        partial(_AsyncCallable()),
        _AsyncCallable(),
        _AsyncCallable().method,
        _PlainCallable(),
        lambda job: _async("p", job),
        lambda job: _plain("p", job),
    ],
    ids=[
        *("partial async", "partial plain", "partial of partial", "partial of async object"),
        *("async object", "async method", "plain object", "plain, returns a coroutine", "lambda"),
    ],
)
async def test_anything_callable_is_a_handler(handler: HandlerFunction) -> None:
    """Functions, methods, partials and objects run, async or not; what they return is awaited where it must be."""
    assert await result_of(handler) == b'["p",["in"]]'


async def test_plain_functions_run_in_threads_side_by_side() -> None:
    """Two plain functions that wait for each other both end, and the event loop goes on meanwhile."""
    storage = MemoryStorage()
    meeting = threading.Barrier(2, timeout=PATIENCE)
    loop = asyncio.get_running_loop()
    ticked = threading.Event()

    def meet(job: Job) -> bool:
        meeting.wait()
        loop.call_soon_threadsafe(ticked.set)
        return ticked.wait(PATIENCE) and threading.current_thread() is not threading.main_thread()

    await steps.enqueue(storage, steps.job("1"), steps.job("2"))
    async with running(Worker(storage, {"work": meet}, concurrency=2)):
        assert (await outcome(storage, "1")).result == b"true"
        assert (await outcome(storage, "2")).result == b"true"


async def test_a_thread_sees_the_context_of_its_attempt() -> None:
    """Context variables a middleware sets, as for logging, are there in a plain function too."""

    async def bind(context: AttemptContext, proceed: Next) -> object:
        WHO.set(context.job.id)
        return await proceed()

    assert await result_of(lambda job: WHO.get(), bind) == b'"job"'


async def test_stop_iteration_in_a_thread_fails_the_attempt() -> None:
    """The one exception a future cannot carry is told as what it was."""
    storage = MemoryStorage()
    empty: list[object] = []
    await steps.enqueue(storage, steps.job("job", max_attempts=1))
    async with running(Worker(storage, {"work": lambda job: next(iter(empty))})):
        ended = await outcome(storage, "job")
    assert ended.error is not None
    assert ended.error.message == "StopIteration()"


async def test_a_handler_gets_the_job() -> None:
    """Id, name, payload, attempt, attempts allowed and time of creation are those of the job."""
    seen: list[Job] = []

    async def look(job: Job) -> None:
        seen.append(job)

    storage = MemoryStorage()
    await steps.enqueue(storage, steps.job("a/b:c", payload=b'{"n":1}', max_attempts=7))
    status = await steps.status(storage, "a/b:c")
    async with running(Worker(storage, {"*": look})):
        await outcome(storage, "a/b:c")
    (job,) = seen
    assert (job.id, job.name, job.payload, job.attempt, job.max_attempts) == ("a/b:c", "work", {"n": 1}, 1, 7)
    assert job.created_at == status.created_at
    assert job.signal.reason is None


async def test_a_handler_says_how_long_its_result_is_kept() -> None:
    """The last call counts, in place of the job's own time; that of an attempt which fails has no effect."""
    clock, recorder = ManualClock(), Recorder()
    storage = MemoryStorage(clock=clock)

    async def work(job: Job) -> None:
        if job.attempt == 1:
            job.keep_result(DROP)
            raise ValueError("not yet")
        if job.id == "a day":
            job.keep_result(DROP)
            job.keep_result(timedelta(days=1))
        elif job.id == "not at all":
            job.keep_result(DROP)

    names = ("a day", "not at all", "an hour")
    await steps.enqueue(storage, *map(steps.job, names))
    async with running(Worker(storage, {"work": work}, observers=[recorder], options=WorkerOptions(retry=AT_ONCE))):
        await recorder.seen(WorkerEventKind.COMPLETED, 3)
    assert [name for name in names if await storage.result(name)] == ["a day", "an hour"]
    clock.advance(timedelta(hours=23))
    assert [name for name in names if await storage.result(name)] == ["a day"]


async def test_middlewares_wrap_in_order() -> None:
    """The first is outermost; they share `data`, and may change the result."""
    steps_taken: list[str] = []

    def layer(name: str) -> Middleware:
        async def wrap(context: AttemptContext, proceed: Next) -> object:
            steps_taken.append(f"{name} in")
            context.data[name] = list(context.data)
            result = await proceed()
            steps_taken.append(f"{name} out")
            return [name, result, context.data[name]]

        return wrap

    async def work(job: Job) -> str:
        steps_taken.append("work")
        return "done"

    assert await result_of(work, layer("a"), layer("b")) == b'["a",["b","done",["a"]],[]]'
    assert steps_taken == ["a in", "b in", "work", "b out", "a out"]


async def test_a_middleware_may_answer_for_the_handler() -> None:
    """One that does not call `next` ends the attempt with its own result; the handler never runs."""
    ran = False

    async def work(job: Job) -> None:
        nonlocal ran
        ran = True

    async def cached(context: AttemptContext, proceed: Next) -> object:
        return [context.job.id, context.queue, context.worker_id]

    assert await result_of(work, cached) == b'["job","default","w1"]'
    assert not ran


async def test_each_attempt_has_its_own_context() -> None:
    """What a middleware keeps about one attempt is not there in the next."""
    leftovers: list[dict[str, object]] = []

    async def look(context: AttemptContext, proceed: Next) -> object:
        leftovers.append(dict(context.data))
        context.data["used"] = True
        return await proceed()

    storage = MemoryStorage()
    await steps.enqueue(storage, steps.job("1"), steps.job("2"))
    async with running(Worker(storage, {"work": done}, options=WorkerOptions(middlewares=[look]))):
        await outcome(storage, "1")
        await outcome(storage, "2")
    assert leftovers == [{}, {}]


async def test_a_middleware_that_fails_fails_the_attempt() -> None:
    """Its exception counts like the handler's; the worker lives on."""

    async def broken(context: AttemptContext, proceed: Next) -> object:
        raise LookupError("no tracer")

    storage = MemoryStorage()
    await steps.enqueue(storage, steps.job("1", max_attempts=1), steps.job("2", max_attempts=1))
    async with running(Worker(storage, {"work": done}, concurrency=1, options=WorkerOptions(middlewares=[broken]))):
        for job_id in ("1", "2"):
            ended = await outcome(storage, job_id)
            assert ended.error is not None
            assert ended.error.type == "LookupError"


async def test_a_signal_fires_once() -> None:
    """Every waiter, early or late, gets the first reason; later ones change nothing."""
    signal = Signal()
    early = [asyncio.create_task(signal.wait()) for _ in range(2)]
    await asyncio.sleep(0)
    assert not early[0].done()
    signal.fire(Reason.LEASE_LOST, LossReason.TAKEN)
    signal.fire(Reason.SHUTDOWN)
    async with asyncio.timeout(PATIENCE):
        assert [await task for task in early] == [Reason.LEASE_LOST, Reason.LEASE_LOST]
        assert await signal.wait() is Reason.LEASE_LOST
    assert signal.loss is LossReason.TAKEN


def test_the_table_prefers_the_name_to_the_catch_all() -> None:
    """A listed name has its own handler, every other the catch-all's."""
    mail, other = Handler(done), Handler(done)
    table = HandlerTable({"mail": mail, "*": other})
    assert table.find("mail") is mail
    assert table.find("sms") is other


def test_an_unknown_name_is_told_with_the_known_ones() -> None:
    """The error names the job's name and what the worker knows."""
    with pytest.raises(UnknownJobError, match=r"named 'sms'; this worker knows \['fax', 'mail'\]"):
        HandlerTable({"mail": done, "fax": done}).find("sms")


@pytest.mark.parametrize("what", ["lease", "timeout"])
@pytest.mark.parametrize("value", [timedelta(0), timedelta(seconds=-1)], ids=str)
def test_a_handler_with_no_time_is_refused(what: str, value: timedelta) -> None:
    """A lease or timeout that is not above zero is a `ValueError` at once."""
    make: Callable[..., Handler] = Handler
    with pytest.raises(ValueError, match=f"handler's {what}"):
        make(done, **{what: value})
