"""How a worker stops: no more claims, then the grace, then an end; and that no job is lost by it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.workers.running import LEASE, Recorder, broken, done, forever, outcome, running
from tests.workers.worker.stopping import HOUR, NO_GRACE, Gate, SlowClaims, run_to_the_end
from workers import WorkerOptions
from workers.jobs import JobState, Settlement, SettleOutcome
from workers.storage.memory import MemoryStorage
from workers.testing import steps
from workers.testing.faults import counting, faulty
from workers.testing.steps import PATIENCE, until
from workers.worker import Worker
from workers.worker.events import WorkerEventKind as Kind


async def test_handlers_that_end_within_the_grace_complete() -> None:
    """A stopping worker lets its handlers finish and settles them, and claims nothing more."""
    storage, gate, recorder = MemoryStorage(), Gate(), Recorder()
    await steps.enqueue(storage, steps.job("running"))
    worker = Worker(storage, {"work": gate}, observers=[recorder], options=WorkerOptions(grace=HOUR))
    async with run_to_the_end(worker) as task:
        await recorder.seen(Kind.ACTIVE)
        worker.stop()
        await steps.enqueue(storage, steps.job("too late"))
        gate.open.set()
        await recorder.seen(Kind.STOPPED)
    await task
    assert await steps.state(storage, "running") is JobState.COMPLETED
    assert await steps.state(storage, "too late") is JobState.QUEUED


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
    worker = Worker(storage, {"work": done}, options=WorkerOptions(grace=HOUR, poll_interval=HOUR))
    async with run_to_the_end(worker) as task:
        await until(lambda: calls["wait"] == 1)
        worker.stop()
    await task


async def test_stop_while_full_ends_after_the_grace() -> None:
    """A worker that waits for a slot notices the stop."""
    storage, recorder = MemoryStorage(), Recorder()
    await steps.enqueue(storage, steps.job(), steps.job())
    worker = Worker(
        storage, {"work": forever}, concurrency=1, observers=[recorder], options=WorkerOptions(grace=NO_GRACE)
    )
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
    worker = Worker(storage, {"work": done}, options=WorkerOptions(grace=HOUR))
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
    worker = Worker(storage, {"work": done}, options=WorkerOptions(grace=HOUR))
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
    worker = Worker(storage, {"work": done}, options=WorkerOptions(grace=HOUR))
    async with run_to_the_end(worker) as task:
        await storage.asked.wait()
        worker.stop()
    await task


async def test_settlements_under_way_are_waited_for() -> None:
    """A job that ended before the stop is settled by it, though the storage fails at first."""
    storage, faults = faulty(MemoryStorage())
    faults.requests_lost["settle"] = 2
    recorder = Recorder()
    await steps.enqueue(storage, steps.job("job"))
    worker = Worker(storage, {"work": done}, observers=[recorder], options=WorkerOptions(grace=HOUR))
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
    worker = Worker(storage, {"work": done}, observers=[recorder], options=WorkerOptions(grace=NO_GRACE))
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
    worker = Worker(storage, {"work": gate}, lease=LEASE, observers=[recorder], options=WorkerOptions(grace=HOUR))
    async with run_to_the_end(worker) as task:
        await recorder.seen(Kind.ACTIVE)
        worker.stop()
        renewed = calls["renew"]
        await until(lambda: calls["renew"] >= renewed + 4)
        recovered = await storage.recover(10)
        assert not recovered.requeued
        gate.open.set()
    await task
    assert await steps.state(storage, "slow") is JobState.COMPLETED
