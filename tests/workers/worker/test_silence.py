"""What would go wrong without a word is said once, with what to do."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import timedelta

import pytest

from tests.workers.running import Recorder, done, running
from workers.jobs import JobState
from workers.queue import Queue
from workers.specs import JobSpec
from workers.storage.memory import MemoryStorage
from workers.testing import steps
from workers.testing.faults import counting, faulty
from workers.testing.steps import PATIENCE, until
from workers.worker import Worker
from workers.worker.events import WorkerEventKind as Kind
from workers.worker.handlers import Job
from workers.worker.leases import LoopWatch
from workers.worker.startup_checks import UnservedNames

MINUTE = timedelta(minutes=1)
SOON = timedelta(milliseconds=5)


def said(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if words in record.getMessage()]


def looking(storage: MemoryStorage) -> UnservedNames:
    return UnservedNames(storage, ["send"], interval=MINUTE, is_idle=lambda: True)


async def test_jobs_that_nobody_serves_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """An idle worker warns of a name that it has no handler for, once, and names those that it has."""
    storage, recorder = MemoryStorage(), Recorder()
    worker = Worker(storage, {"send": done}, observers=[recorder], lease=2 * SOON)
    async with running(worker):
        await steps.enqueue(storage, steps.job("a", name="snd"), steps.job("b", name="snd"))
        await until(lambda: said(caplog, "'snd' wait"))
        await storage.drain()
        await steps.enqueue(storage, steps.job("c", name="snd"), steps.job("d", name="sent"))
        await until(lambda: said(caplog, "'sent' wait"))
    [told] = said(caplog, "'snd' wait")
    assert "['send']" in told
    assert "add a handler" in told


async def test_only_what_goes_on_waiting_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """Not a job that somebody took by the next look, whose name runs somewhere, or in a queue that is paused."""
    storage = MemoryStorage()
    look = looking(storage)
    await steps.enqueue(storage, steps.job("a", name="other"), steps.job("mine", name="send"))
    await look.look()
    [held] = await storage.claim("w", leases={"other": MINUTE}, limit=1)
    await steps.enqueue(storage, steps.job("b", name="other"))
    await look.look()
    await look.look()
    assert not caplog.records
    await steps.apply(storage, steps.completed(held))
    await storage.pause()
    await look.look()
    assert not caplog.records
    await storage.resume()
    await look.look()
    assert len(said(caplog, "'other' wait")) == len(caplog.records) == 1


async def test_a_worker_for_every_name_looks_for_none() -> None:
    """Nor one on a storage whose workers fail what they do not know; both cost nothing."""
    storage, calls = counting(MemoryStorage())
    recorder = Recorder()
    async with running(Worker(storage, {"*": done}, observers=[recorder], lease=SOON)):
        await until(lambda: calls["recover"] > 5)
    assert calls["list"] == 0


async def test_a_look_survives_its_storage(caplog: pytest.LogCaptureFixture) -> None:
    """A storage that does not answer is asked again."""
    storage, faults = faulty(MemoryStorage())
    await steps.enqueue(storage, steps.job("a", name="snd"))
    faults.requests_lost["list"] = 3
    async with running(Worker(storage, {"send": done}, lease=2 * SOON)):
        await steps.enqueue(storage, steps.job("b", name="send"))
        await until(lambda: said(caplog, "'snd' wait"))


async def test_a_blocked_loop_is_told_of_with_what_was_lost(caplog: pytest.LogCaptureFixture) -> None:
    """An async handler that blocks for longer than its lease loses the job to another worker, and both are said."""
    storage, recorder = MemoryStorage(), Recorder()
    lease = timedelta(milliseconds=60)

    async def block(job: Job) -> None:
        if job.attempt == 1:
            await asyncio.sleep(0)
            time.sleep(0.2)  # noqa: ASYNC251 - what the test is about
            await storage.recover(1)  # as another process did meanwhile
            await asyncio.Event().wait()

    await steps.enqueue(storage, steps.job("job"))
    async with running(Worker(storage, {"work": block}, lease=lease, observers=[recorder])):
        async with asyncio.timeout(PATIENCE):
            await recorder.seen(Kind.LEASE_LOST)
            await recorder.seen(Kind.COMPLETED)
    assert len(said(caplog, "the event loop was blocked for 0.")) == 1
    [lost] = said(caplog, "leases were lost")
    assert "job" in lost
    assert "plain function" in lost


async def test_a_blockage_of_a_third_of_the_lease_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """Also one that begins right behind a renewal, and is over before the lease is."""
    storage, recorder = MemoryStorage(), Recorder()

    async def block(job: Job) -> None:
        time.sleep(0.7)  # noqa: ASYNC251 - what the test is about

    await steps.enqueue(storage, steps.job("job"))
    async with running(Worker(storage, {"work": block}, lease=timedelta(seconds=1.5), observers=[recorder])):
        await recorder.seen(Kind.COMPLETED)
        await until(lambda: said(caplog, "the event loop was blocked for 0."))
    assert not said(caplog, "leases were lost")


def test_a_loop_is_watched_with_patience(caplog: pytest.LogCaptureFixture) -> None:
    """What a lease bears is no blockage; more is said once."""
    watch = LoopWatch(10.0)
    assert not watch.woke(9.9)
    watch.lost([])
    assert not caplog.records
    assert watch.woke(10.1)
    assert watch.woke(11.0)
    watch.lost(["a\nb"])
    watch.lost(["c"])
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "a\\nb" in caplog.messages[1]


async def test_a_producer_hears_of_a_name_without_handler(caplog: pytest.LogCaptureFixture) -> None:
    """A queue that has handlers warns once per name that is none of theirs; the job is enqueued all the same."""
    queue = Queue(MemoryStorage())
    await queue.enqueue(1)  # it only enqueues: others have the handlers
    queue.execute({"send": done})
    await queue.enqueue(2, name="send")
    assert not caplog.records
    await queue.enqueue(3)
    await queue.enqueue_many([JobSpec(payload=4), JobSpec(payload=5, name="snd")])
    assert len(caplog.records) == 2
    assert ["named 'default'" in told for told in caplog.messages] == [True, False]
    assert "named 'snd'" in caplog.messages[1]
    assert "['send']" in caplog.messages[1]
    assert (await queue.counts())[JobState.QUEUED] == 5
    await queue.stop()


async def test_a_queue_with_a_catch_all_serves_every_name(caplog: pytest.LogCaptureFixture) -> None:
    """It has a handler for each."""
    queue = Queue(MemoryStorage())
    queue.execute(done)
    await queue.enqueue(1, name="anything")
    assert not caplog.records
    await queue.stop()


async def test_a_stop_begins_and_ends() -> None:
    """`stopping` comes when the worker claims no more, while its handlers still run; `stopped` when all has ended."""
    storage, recorder = MemoryStorage(), Recorder()
    finish = asyncio.Event()

    async def wait(job: Job) -> None:
        await finish.wait()

    await steps.enqueue(storage, steps.job("job"))
    worker = Worker(storage, {"work": wait}, observers=[recorder])
    running_worker = asyncio.create_task(worker.run())
    await recorder.seen(Kind.ACTIVE)
    worker.stop()
    await recorder.seen(Kind.STOPPING)
    finish.set()
    await running_worker
    assert recorder.story() == [Kind.READY, Kind.ACTIVE, Kind.STOPPING, Kind.COMPLETED, Kind.DRAINED, Kind.STOPPED]
