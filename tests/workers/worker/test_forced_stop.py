"""How a worker ends whose handlers do not, by force or by cancellation; and that no job is lost by it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from tests import warm
from tests.workers.running import Recorder, forever
from tests.workers.worker.stopping import HOUR, NO_GRACE, SlowClaims, assert_released, run_to_the_end
from workers import WorkerOptions
from workers.jobs import JobState, Recovery
from workers.middlewares import log_attempts
from workers.storage.memory import MemoryStorage
from workers.storage.sql import SqlStorage
from workers.testing import steps
from workers.testing.steps import PATIENCE
from workers.worker import Worker
from workers.worker.events import WorkerEventKind as Kind
from workers.worker.handlers import Job, SignalReason


async def test_handlers_that_hang_are_cancelled_and_given_back() -> None:
    """After the grace a handler is told `shutdown`, cancelled, and its job is claimable at once, uncounted."""
    storage, recorder = MemoryStorage(), Recorder()
    reasons: list[SignalReason | None] = []

    async def hang(job: Job) -> None:
        try:
            await forever(job)
        finally:
            reasons.append(job.signal.reason)

    await steps.enqueue(storage, steps.job("hanging"))
    worker = Worker(
        storage, {"work": hang}, observers=[recorder], options=WorkerOptions(grace=timedelta(milliseconds=50))
    )
    async with run_to_the_end(worker) as task:
        await recorder.seen(Kind.ACTIVE)
        worker.stop()
    await task
    assert reasons == [SignalReason.SHUTDOWN]
    assert recorder.story("hanging") == [Kind.ACTIVE, Kind.RELEASED]
    await assert_released(storage, "hanging")


async def test_a_handler_that_ends_well_while_being_forced_completes() -> None:
    """A result returned in answer to the cancellation counts."""
    storage, recorder = MemoryStorage(), Recorder()

    async def wrap_up(job: Job) -> str:
        try:
            await forever(job)
        except asyncio.CancelledError:
            return "just in time"
        return "nobody cancelled"

    await steps.enqueue(storage, steps.job("job"))
    worker = Worker(storage, {"work": wrap_up}, observers=[recorder], options=WorkerOptions(grace=NO_GRACE))
    async with run_to_the_end(worker):
        await recorder.seen(Kind.ACTIVE)
        worker.stop()
    ended = await storage.result("job")
    assert ended is not None
    assert ended.result == b'"just in time"'


@pytest.mark.usefixtures("short_force")
async def test_handlers_that_will_not_end_are_abandoned(caplog: pytest.LogCaptureFixture) -> None:
    """A handler that swallows its cancellation does not hold up the stop; its job's id is logged for its lease to end.

    When it ends after all, its result has no effect.
    """
    storage, recorder = MemoryStorage(), Recorder()
    let_go = asyncio.Event()

    async def stubborn(job: Job) -> str:
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue
        return "too late"

    await steps.enqueue(storage, steps.job("stubborn"), steps.job("other"))
    worker = Worker(
        storage, {"work": stubborn}, observers=[recorder], options=WorkerOptions(grace=NO_GRACE, worker_id="w1")
    )
    try:
        async with run_to_the_end(worker) as task:
            await recorder.seen(Kind.ACTIVE, 2)
            worker.stop()
        await task
    finally:
        let_go.set()
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert errors == [
        "worker w1 gave up on jobs that did not end: ['other', 'stubborn']; "
        "they will be recovered when their leases end"
    ]
    await recorder.seen(Kind.LEASE_LOST, 2)
    assert await steps.state(storage, "stubborn") is JobState.PROCESSING
    assert worker.running == 0


async def test_a_thread_that_never_ends_does_not_hold_up_a_stop(caplog: pytest.LogCaptureFixture) -> None:
    """A plain function cannot be interrupted: the worker ends without it, and its job is left to the lease, as nobody
    may begin it while the function goes on; nor does the log say that anybody could.
    """
    storage, recorder = MemoryStorage(), Recorder()
    let_go = threading.Event()
    await steps.enqueue(storage, steps.job("threaded"))
    options = WorkerOptions(grace=NO_GRACE, middlewares=(log_attempts,))
    worker = Worker(storage, {"work": lambda job: let_go.wait()}, observers=[recorder], options=options)
    try:
        async with run_to_the_end(worker) as task:
            await recorder.seen(Kind.ACTIVE)
            worker.stop()
        await task
        assert await steps.state(storage, "threaded") is JobState.PROCESSING
        assert worker.running == 0
        assert "job threaded (work) attempt 1 of 3: abandoned after" in caplog.text
    finally:
        let_go.set()


async def test_a_thread_that_never_ends_does_not_keep_the_process(tmp_path: Path) -> None:
    """After a stop the interpreter exits, though a plain function is still running."""
    script = tmp_path / "never_ends.py"
    script.write_text(
        "import asyncio, threading\n"
        "from datetime import timedelta\n"
        "from workers import Queue, QueueOptions\n"
        "from workers.storage.memory import MemoryStorage\n"
        "async def main():\n"
        "    started = asyncio.Event()\n"
        "    loop = asyncio.get_running_loop()\n"
        "    def never_ends(job):\n"
        "        loop.call_soon_threadsafe(started.set)\n"
        "        threading.Event().wait()\n"
        "    queue = Queue(MemoryStorage(), options=QueueOptions(grace=timedelta(0)))\n"
        "    queue.execute(never_ends)\n"
        "    async with queue:\n"
        "        await queue.enqueue(1)\n"
        "        await started.wait()\n"
        "asyncio.run(main())\n"
    )
    child = await asyncio.create_subprocess_exec(warm.PYTHON, str(script))
    try:
        async with asyncio.timeout(2 * PATIENCE):
            assert await child.wait() == 0
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


@pytest.mark.parametrize(("grace", "signals"), [("0.2", 1), ("3600", 2)], ids=["after the grace", "asked twice"])
async def test_sigterm_ends_a_process_whose_handlers_hang(grace: str, signals: int, tmp_path: Path) -> None:
    """A cancellable handler is given back; what swallows its cancellation, and a thread, are named and left to leases.

    A process asked once sits out the grace; asked twice it does not.
    """
    url = f"sqlite:///{tmp_path}/jobs.db"
    storage = SqlStorage(url)
    await storage.migrate()
    await storage.connect()
    names = ("obeys", "swallows", "never ends")
    await steps.enqueue(storage, *(steps.job(name, name=name) for name in names))
    command = ("-m", "tests.workers.worker.stubborn_child", url, grace)
    child = await asyncio.create_subprocess_exec(warm.PYTHON, *command, stdout=asyncio.subprocess.PIPE)
    try:
        assert child.stdout is not None
        async with asyncio.timeout(2 * PATIENCE):
            assert await child.stdout.readline() == b"ready\n"
            for _ in range(signals):
                child.terminate()
                assert await child.stdout.readline() == b"asked\n"
            *said, last = (await child.stdout.read()).decode().splitlines()
            assert await child.wait() == 0
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    assert last == "stopped"
    [error] = [line for line in said if line.startswith("ERROR")]
    assert "gave up on jobs that did not end: ['never ends', 'swallows']" in error
    found = {name: await steps.status(storage, name) for name in names}
    await storage.disconnect()
    assert {name: (status.state.value, status.attempt) for name, status in found.items()} == {
        "obeys": ("queued", 0),
        "never ends": ("processing", 1),
        "swallows": ("processing", 1),
    }


async def test_a_second_stop_skips_the_grace() -> None:
    """Asked again, the worker cancels its handlers now."""
    storage, recorder = MemoryStorage(), Recorder()
    await steps.enqueue(storage, steps.job("hanging"))
    worker = Worker(storage, {"work": forever}, observers=[recorder], options=WorkerOptions(grace=HOUR))
    async with run_to_the_end(worker) as task:
        await recorder.seen(Kind.ACTIVE)
        worker.stop()
        await asyncio.sleep(0.05)
        assert not task.done()
        worker.stop()
    await task
    await assert_released(storage, "hanging")


async def test_cancelling_run_gives_jobs_back() -> None:
    """Cancellation stops without grace: handlers are cancelled, their jobs released, and it is passed on."""
    storage, recorder = MemoryStorage(), Recorder()
    await steps.enqueue(storage, steps.job("hanging"))
    async with run_to_the_end(
        Worker(storage, {"work": forever}, observers=[recorder], options=WorkerOptions(grace=HOUR))
    ) as task:
        await recorder.seen(Kind.ACTIVE)
        task.cancel()
    assert task.cancelled()
    assert recorder.story()[-2:] == [Kind.RELEASED, Kind.STOPPED]
    await assert_released(storage, "hanging")


async def test_cancelling_during_the_grace_gives_jobs_back() -> None:
    """A worker that is cancelled while it stops skips what is left of the grace, and still releases."""
    storage, recorder = MemoryStorage(), Recorder()
    await steps.enqueue(storage, steps.job("hanging"))
    worker = Worker(storage, {"work": forever}, observers=[recorder], options=WorkerOptions(grace=HOUR))
    async with run_to_the_end(worker) as task:
        await recorder.seen(Kind.ACTIVE)
        worker.stop()
        await asyncio.sleep(0.02)
        task.cancel()
    assert task.cancelled()
    await assert_released(storage, "hanging")


def test_a_loop_that_is_torn_down_takes_the_worker_with_it() -> None:
    """When everything is cancelled at once nothing can be settled any more: the job is left to the end of its lease."""
    storage, recorder = MemoryStorage(), Recorder()

    async def leave_it_running() -> asyncio.Task[None]:
        await steps.enqueue(storage, steps.job("job"))
        task = asyncio.create_task(
            Worker(storage, {"work": forever}, observers=[recorder], options=WorkerOptions(grace=HOUR)).run()
        )
        await recorder.seen(Kind.ACTIVE)
        return task

    task = asyncio.run(leave_it_running())
    assert task.cancelled()
    assert recorder.story() == [Kind.READY, Kind.ACTIVE, Kind.STOPPING, Kind.STOPPED]
    status = asyncio.run(steps.status(storage, "job"))
    assert (status.state, status.attempt) == (JobState.PROCESSING, 1)


async def test_claims_that_arrive_during_a_cancellation_are_given_back() -> None:
    """The jobs of a claim whose answer was on its way when the worker was cancelled are released, not lost."""
    storage = SlowClaims()
    await steps.enqueue(storage, steps.job("job"))
    async with run_to_the_end(Worker(storage, {"work": forever}, options=WorkerOptions(grace=HOUR))) as task:
        await storage.asked.wait()
        task.cancel()
        await asyncio.sleep(0.02)
        storage.answer.set()
    assert task.cancelled()
    await assert_released(storage, "job")


class DeafRecovery(MemoryStorage):
    """Its recovery hangs, and swallows the first cancellation, as what it awaits may."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()

    async def recover(self, limit: int, *, max_stalls: int) -> Recovery:
        self.begun.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return await asyncio.Future()


@pytest.mark.parametrize("end", [Worker.stop, None], ids=["stop", "cancel"])
async def test_a_cancellation_that_is_swallowed_is_repeated(end: Callable[[Worker], None] | None) -> None:
    """A recovery that a stop cannot cancel at once does not hold it up for ever."""
    storage = DeafRecovery()
    worker = Worker(storage, {"work": forever}, options=WorkerOptions(grace=NO_GRACE))
    task = asyncio.create_task(worker.run())
    await storage.begun.wait()
    if end is None:
        task.cancel()
    else:
        end(worker)
    async with asyncio.timeout(PATIENCE):
        await asyncio.wait([task])
    assert task.cancelled() is (end is None)
