"""How a worker stops: no more claims, then the grace, then force; and that no job is lost by it."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from tests.workers.running import PATIENCE, Recorder, broken, done, forever, outcome, running, until
from workers.jobs import Claim, JobState, Settlement, SettleOutcome
from workers.storage.base import Storage
from workers.storage.memory import MemoryStorage
from workers.storage.sql import SqlStorage
from workers.testing import steps
from workers.testing.faults import counting, faulty
from workers.worker import Worker
from workers.worker.events import WorkerEventKind as Kind
from workers.worker.handlers import Job, SignalReason

HOUR = timedelta(hours=1)
NO_GRACE = timedelta(0)


@pytest.fixture
def short_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not end when forced to is given up after 0.1 s instead of 5 s."""
    monkeypatch.setattr("workers.worker.FORCED_STOP_SECONDS", 0.1)


@asynccontextmanager
async def run_to_the_end(worker: Worker) -> AsyncIterator[asyncio.Task[None]]:
    """The worker runs; the block stops it, and it must have ended soon after."""
    task = asyncio.create_task(worker.run())
    try:
        yield task
        async with asyncio.timeout(PATIENCE):
            await asyncio.wait([task])
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Gate:
    """A handler that waits to be let through, and ends well."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(self, job: Job) -> None:
        await self.open.wait()


class SlowClaims(MemoryStorage):
    """Claims reach the storage at once; their answers wait for `answer`."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.answer = asyncio.Event()

    async def claim(self, worker_id: str, *, leases: Mapping[str, timedelta], limit: int) -> list[Claim]:
        claims = await super().claim(worker_id, leases=leases, limit=limit)
        self.asked.set()
        await self.answer.wait()
        return claims


async def assert_released(storage: Storage, job_id: str) -> None:
    """The job is claimable now, and its attempt was not counted."""
    status = await steps.status(storage, job_id)
    assert (status.state, status.attempt) == (JobState.QUEUED, 0)
    claim = await steps.claim_one(storage)
    assert claim.job_id == job_id


async def test_handlers_that_end_within_the_grace_complete() -> None:
    """A stopping worker lets its handlers finish and settles them, and claims nothing more."""
    storage, gate, recorder = MemoryStorage(), Gate(), Recorder()
    await steps.enqueue(storage, steps.job("running"))
    worker = Worker(storage, {"work": gate}, grace=HOUR, observers=[recorder])
    async with run_to_the_end(worker) as task:
        await recorder.seen(Kind.ACTIVE)
        worker.stop()
        await steps.enqueue(storage, steps.job("too late"))
        gate.open.set()
        await recorder.seen(Kind.STOPPED)
    await task
    assert await steps.state(storage, "running") is JobState.COMPLETED
    assert await steps.state(storage, "too late") is JobState.QUEUED


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
    worker = Worker(storage, {"work": hang}, grace=timedelta(milliseconds=50), observers=[recorder])
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
    worker = Worker(storage, {"work": wrap_up}, grace=NO_GRACE, observers=[recorder])
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
    worker = Worker(storage, {"work": stubborn}, grace=NO_GRACE, worker_id="w1", observers=[recorder])
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


async def test_a_thread_that_never_ends_does_not_hold_up_a_stop() -> None:
    """A plain function cannot be cancelled; its job is given back, and the worker ends without it."""
    storage, recorder = MemoryStorage(), Recorder()
    let_go = threading.Event()
    await steps.enqueue(storage, steps.job("threaded"))
    worker = Worker(storage, {"work": lambda job: let_go.wait()}, grace=NO_GRACE, observers=[recorder])
    try:
        async with run_to_the_end(worker) as task:
            await recorder.seen(Kind.ACTIVE)
            worker.stop()
        await task
        await assert_released(storage, "threaded")
    finally:
        let_go.set()


async def test_a_thread_that_never_ends_does_not_keep_the_process(tmp_path: Path) -> None:
    """After a stop the interpreter exits, though a plain function is still running."""
    script = tmp_path / "never_ends.py"
    script.write_text(
        "import asyncio, threading\n"
        "from datetime import timedelta\n"
        "from workers import Queue\n"
        "from workers.storage.memory import MemoryStorage\n"
        "async def main():\n"
        "    started = asyncio.Event()\n"
        "    loop = asyncio.get_running_loop()\n"
        "    def never_ends(job):\n"
        "        loop.call_soon_threadsafe(started.set)\n"
        "        threading.Event().wait()\n"
        "    queue = Queue(MemoryStorage(), grace=timedelta(0))\n"
        "    queue.execute(never_ends)\n"
        "    async with queue:\n"
        "        await queue.enqueue(1)\n"
        "        await started.wait()\n"
        "asyncio.run(main())\n"
    )
    child = await asyncio.create_subprocess_exec(sys.executable, str(script))
    try:
        async with asyncio.timeout(2 * PATIENCE):
            assert await child.wait() == 0
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


@pytest.mark.parametrize(("grace", "signals"), [("0.2", 1), ("3600", 2)], ids=["after the grace", "asked twice"])
async def test_sigterm_ends_a_process_whose_handlers_hang(grace: str, signals: int, tmp_path: Path) -> None:
    """A cancellable handler and a thread are given back, what swallows its cancellation is named and left to its lease.

    A process asked once sits out the grace; asked twice it does not.
    """
    url = f"sqlite:///{tmp_path}/jobs.db"
    storage = SqlStorage(url)
    await storage.migrate()
    await storage.connect()
    names = ("obeys", "swallows", "never ends")
    await steps.enqueue(storage, *(steps.job(name, name=name) for name in names))
    command = ("-m", "tests.workers.worker.stubborn_child", url, grace)
    child = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
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
    assert "gave up on jobs that did not end: ['swallows']" in error
    found = {name: await steps.status(storage, name) for name in names}
    await storage.disconnect()
    assert {name: (status.state.value, status.attempt) for name, status in found.items()} == {
        "obeys": ("queued", 0),
        "never ends": ("queued", 0),
        "swallows": ("processing", 1),
    }


async def test_a_second_stop_skips_the_grace() -> None:
    """Asked again, the worker cancels its handlers now."""
    storage, recorder = MemoryStorage(), Recorder()
    await steps.enqueue(storage, steps.job("hanging"))
    worker = Worker(storage, {"work": forever}, grace=HOUR, observers=[recorder])
    async with run_to_the_end(worker) as task:
        await recorder.seen(Kind.ACTIVE)
        worker.stop()
        await asyncio.sleep(0.05)
        assert not task.done()
        worker.stop()
    await task
    await assert_released(storage, "hanging")


async def test_stop_before_run_runs_nothing() -> None:
    """A worker stopped before it ran ends at once and never touches the storage."""
    storage, calls = counting(MemoryStorage())
    recorder = Recorder()
    worker = Worker(storage, {"work": done}, observers=[recorder])
    worker.stop()
    async with asyncio.timeout(PATIENCE):
        await worker.run()
    assert not calls
    assert recorder.story() == [Kind.STOPPED]


async def test_stop_while_waiting_ends_at_once() -> None:
    """An idle worker does not sit out its poll interval."""
    storage, calls = counting(MemoryStorage())
    worker = Worker(storage, {"work": done}, grace=HOUR, poll_interval=HOUR)
    async with run_to_the_end(worker) as task:
        await until(lambda: calls["wait"] == 1)
        worker.stop()
    await task


async def test_stop_while_full_ends_after_the_grace() -> None:
    """A worker that waits for a slot notices the stop."""
    storage, recorder = MemoryStorage(), Recorder()
    await steps.enqueue(storage, steps.job(), steps.job())
    worker = Worker(storage, {"work": forever}, concurrency=1, grace=NO_GRACE, observers=[recorder])
    async with run_to_the_end(worker) as task:
        await recorder.seen(Kind.ACTIVE)
        worker.stop()
    await task
    assert (await storage.counts())[JobState.QUEUED] == 2


async def test_stop_while_the_storage_refuses_connections() -> None:
    """A worker that cannot reach its storage reports it, tries again, and stops when asked."""
    storage, faults = faulty(MemoryStorage())
    broken(faults, "connect")
    recorder = Recorder()
    worker = Worker(storage, {"work": done}, observers=[recorder])
    async with run_to_the_end(worker) as task:
        await recorder.seen(Kind.ERROR, 2)
        worker.stop()
    await task
    assert set(recorder.story()) == {Kind.ERROR, Kind.STOPPED}


async def test_stop_while_the_storage_does_not_answer_the_connection() -> None:
    """A connection that hangs does not hold up a stop."""

    class Silent(MemoryStorage):
        async def connect(self) -> None:
            connecting.set()
            await asyncio.Event().wait()

    connecting = asyncio.Event()
    worker = Worker(Silent(), {"work": done})
    async with run_to_the_end(worker) as task:
        await connecting.wait()
        worker.stop()
    await task


async def test_claims_that_arrive_after_the_stop_are_run() -> None:
    """A claim under way when the worker is asked to stop still gets its grace."""
    storage = SlowClaims()
    await steps.enqueue(storage, steps.job("job"))
    worker = Worker(storage, {"work": done}, grace=HOUR)
    async with run_to_the_end(worker) as task:
        await storage.asked.wait()
        worker.stop()
        storage.answer.set()
    await task
    assert await steps.state(storage, "job") is JobState.COMPLETED


@pytest.mark.usefixtures("short_force")
async def test_a_claim_may_take_its_time() -> None:
    """Only a stopping worker limits how long a claim may take."""
    storage = SlowClaims()
    await steps.enqueue(storage, steps.job("job"))
    worker = Worker(storage, {"work": done}, grace=HOUR)
    async with run_to_the_end(worker):
        await storage.asked.wait()
        await asyncio.sleep(0.3)
        storage.answer.set()
        await outcome(storage, "job")
        worker.stop()
    assert (await steps.status(storage, "job")).attempt == 1


@pytest.mark.usefixtures("short_force")
async def test_a_claim_that_is_never_answered_does_not_hold_up_a_stop() -> None:
    """A storage that hangs in a claim is given up after the forced stop's time."""
    storage = SlowClaims()
    worker = Worker(storage, {"work": done}, grace=HOUR)
    async with run_to_the_end(worker) as task:
        await storage.asked.wait()
        worker.stop()
    await task


async def test_cancelling_run_gives_jobs_back() -> None:
    """Cancellation stops without grace: handlers are cancelled, their jobs released, and it is passed on."""
    storage, recorder = MemoryStorage(), Recorder()
    await steps.enqueue(storage, steps.job("hanging"))
    async with run_to_the_end(Worker(storage, {"work": forever}, grace=HOUR, observers=[recorder])) as task:
        await recorder.seen(Kind.ACTIVE)
        task.cancel()
    assert task.cancelled()
    assert recorder.story()[-2:] == [Kind.RELEASED, Kind.STOPPED]
    await assert_released(storage, "hanging")


async def test_cancelling_during_the_grace_gives_jobs_back() -> None:
    """A worker that is cancelled while it stops skips what is left of the grace, and still releases."""
    storage, recorder = MemoryStorage(), Recorder()
    await steps.enqueue(storage, steps.job("hanging"))
    worker = Worker(storage, {"work": forever}, grace=HOUR, observers=[recorder])
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
        task = asyncio.create_task(Worker(storage, {"work": forever}, grace=HOUR, observers=[recorder]).run())
        await recorder.seen(Kind.ACTIVE)
        return task

    task = asyncio.run(leave_it_running())
    assert task.cancelled()
    assert recorder.story() == [Kind.READY, Kind.ACTIVE, Kind.STOPPED]
    status = asyncio.run(steps.status(storage, "job"))
    assert (status.state, status.attempt) == (JobState.PROCESSING, 1)


async def test_claims_that_arrive_during_a_cancellation_are_given_back() -> None:
    """The jobs of a claim whose answer was on its way when the worker was cancelled are released, not lost."""
    storage = SlowClaims()
    await steps.enqueue(storage, steps.job("job"))
    async with run_to_the_end(Worker(storage, {"work": forever}, grace=HOUR)) as task:
        await storage.asked.wait()
        task.cancel()
        await asyncio.sleep(0.02)
        storage.answer.set()
    assert task.cancelled()
    await assert_released(storage, "job")


async def test_settlements_under_way_are_waited_for() -> None:
    """A job that ended before the stop is settled by it, though the storage fails at first."""
    storage, faults = faulty(MemoryStorage())
    faults.requests_lost["settle"] = 2
    recorder = Recorder()
    await steps.enqueue(storage, steps.job("job"))
    worker = Worker(storage, {"work": done}, grace=HOUR, observers=[recorder])
    async with run_to_the_end(worker) as task:
        await recorder.seen(Kind.ERROR)
        worker.stop()
    await task
    assert await steps.state(storage, "job") is JobState.COMPLETED


@pytest.mark.usefixtures("short_force")
async def test_settlements_the_storage_does_not_take_are_given_up() -> None:
    """A storage that is gone for good does not hold up a stop; the job is left to the end of its lease."""

    class Silent(MemoryStorage):
        async def settle(self, settlements: Sequence[Settlement]) -> list[SettleOutcome]:
            settling.set()
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    settling = asyncio.Event()
    storage, recorder = Silent(), Recorder()
    await steps.enqueue(storage, steps.job("job"))
    worker = Worker(storage, {"work": done}, grace=NO_GRACE, observers=[recorder])
    async with run_to_the_end(worker) as task:
        await settling.wait()
        worker.stop()
    await task
    await recorder.seen(Kind.LEASE_LOST)
    assert worker.running == 0
    assert await steps.state(storage, "job") is JobState.PROCESSING


async def test_a_stopped_worker_has_let_go_of_the_storage() -> None:
    """Every connect has its disconnect, and no task of the worker is left."""
    storage, calls = counting(MemoryStorage())
    recorder = Recorder()
    before = asyncio.all_tasks()
    async with running(Worker(storage, {"work": done}, observers=[recorder])):
        await recorder.seen(Kind.READY)
    assert calls["connect"] == calls["disconnect"] == 1
    await until(lambda: asyncio.all_tasks() == before)


async def test_leases_are_kept_during_the_grace() -> None:
    """A handler that uses its grace for longer than its lease is neither recovered nor run twice."""
    storage, calls = counting(MemoryStorage())
    gate, recorder = Gate(), Recorder()
    await steps.enqueue(storage, steps.job("slow"))
    lease = timedelta(milliseconds=200)
    worker = Worker(storage, {"work": gate}, grace=HOUR, lease=lease, observers=[recorder])
    async with run_to_the_end(worker) as task:
        await recorder.seen(Kind.ACTIVE)
        worker.stop()
        renewed = calls["renew"]
        await until(lambda: calls["renew"] >= renewed + 5)
        recovered = await storage.recover(10)
        assert not recovered.requeued
        gate.open.set()
    await task
    assert await steps.state(storage, "slow") is JobState.COMPLETED
