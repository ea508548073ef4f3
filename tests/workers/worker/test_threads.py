"""Plain functions, which nobody can interrupt: their attempts last as long as they do."""

from __future__ import annotations

import asyncio
import logging
import threading
from datetime import timedelta

import pytest

from tests.patience import until
from tests.workers.running import Recorder, outcome, running
from workers import WorkerOptions
from workers.jobs import JobState, OutcomeKind
from workers.retry import RetryPolicy
from workers.storage.memory import MemoryStorage
from workers.testing import steps
from workers.testing.steps import PATIENCE
from workers.worker import Worker
from workers.worker.events import WorkerEventKind as Kind
from workers.worker.handlers import Handler, Job

SOON = timedelta(milliseconds=10)
AT_ONCE = RetryPolicy(initial=timedelta(milliseconds=1), multiplier=1, jitter=0)


class Threads:
    """A plain handler that counts its threads, and ends when it is let go."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.go = threading.Event()
        self.now = self.most = self.runs = 0
        self.at_once: dict[str, int] = {}
        self.twice: set[str] = set()

    def __call__(self, job: Job) -> str:
        with self.lock:
            self.runs += 1
            self.now += 1
            self.most = max(self.most, self.now)
            self.at_once[job.id] = self.at_once.get(job.id, 0) + 1
            if self.at_once[job.id] > 1:
                self.twice.add(job.id)
        self.go.wait(PATIENCE)
        with self.lock:
            self.now -= 1
            self.at_once[job.id] -= 1
        return "done"


async def test_threads_are_never_more_than_the_concurrency(caplog: pytest.LogCaptureFixture) -> None:
    """Jobs that run out of time keep their slots until their functions end, no retry begins before, and it is told."""
    storage, threads, recorder = MemoryStorage(), Threads(), Recorder()
    await steps.enqueue(storage, *(steps.job(str(number), max_attempts=1_000) for number in range(4)))
    handler = Handler(threads, timeout=SOON, retry=AT_ONCE)
    with caplog.at_level(logging.WARNING):
        worker = Worker(storage, {"work": handler}, concurrency=2, observers=[recorder])
        async with running(worker):
            await until(lambda: sum("twice its timeout" in line for line in caplog.messages) == 2)
            assert (threads.runs, threads.now, worker.running) == (2, 2, 2)
            assert [await steps.state(storage, str(number)) for number in (0, 1)] == 2 * [JobState.PROCESSING]
            threads.go.set()
            await recorder.seen(Kind.COMPLETED, 4)  # the two at once, and the others when they are tried again
    assert threads.most == 2
    assert threads.twice == set()


async def test_a_function_that_was_out_of_time_fails_its_attempt_when_it_ends() -> None:
    """What it returned is too late; its lease was kept alive meanwhile, so nobody else took the job."""
    storage, threads = MemoryStorage(), Threads()
    await steps.enqueue(storage, steps.job("late", max_attempts=1))
    worker = Worker(storage, {"work": Handler(threads, timeout=SOON)}, lease=timedelta(seconds=1))
    async with running(worker):
        await until(lambda: threads.now)
        await asyncio.get_running_loop().run_in_executor(None, threads.go.wait, 2.2)  # for two leases
        assert await steps.state(storage, "late") is JobState.PROCESSING
        threads.go.set()
        ended = await outcome(storage, "late")
    assert ended.kind is OutcomeKind.FAILED
    assert ended.error is not None
    assert ended.error.type == "HandlerTimeout"
    assert threads.runs == 1


async def test_a_cancelled_job_ends_when_its_function_does() -> None:
    """Until then it is processing."""
    storage, threads = MemoryStorage(), Threads()
    await steps.enqueue(storage, steps.job("unwanted"))
    async with running(Worker(storage, {"work": threads})):
        await until(lambda: threads.now)
        await storage.cancel("unwanted")
        assert await steps.state(storage, "unwanted") is JobState.PROCESSING
        threads.go.set()
        ended = await outcome(storage, "unwanted")
    assert ended.kind is OutcomeKind.CANCELLED or (ended.error is not None and "Cancelled" in ended.error.type)


async def test_what_a_function_did_by_the_end_of_a_stop_counts() -> None:
    """It is not done again by the next worker, as a job that is given back would be."""
    storage, threads = MemoryStorage(), Threads()
    await steps.enqueue(storage, steps.job("nearly"))
    seen: list[object] = []

    def ends_when_told(job: Job) -> str:
        threads(job)
        seen.append(job.signal.reason)
        return "done"

    worker = Worker(storage, {"work": ends_when_told}, options=WorkerOptions(grace=timedelta(0)))
    task = asyncio.create_task(worker.run())
    await until(lambda: threads.now)
    worker.stop()
    asyncio.get_running_loop().call_later(0.2, threads.go.set)
    await task
    assert await steps.state(storage, "nearly") is JobState.COMPLETED


async def test_a_job_that_gets_no_thread_was_not_tried(caplog: pytest.LogCaptureFixture) -> None:
    """A machine may have no more of them for now; that costs the job no attempt."""
    storage, recorder, attempts = MemoryStorage(), Recorder(), list[int]()

    def work(job: Job) -> None:
        attempts.append(job.attempt)

    await steps.enqueue(storage, steps.job("job", name="plain", max_attempts=1))
    usual = threading.stack_size(2**47)  # more than a process can address
    try:
        async with running(Worker(storage, {"plain": work}, observers=[recorder])):
            await recorder.seen(Kind.SNOOZED)
            threading.stack_size(usual)
            assert (await outcome(storage, "job")).kind is OutcomeKind.COMPLETED
    finally:
        threading.stack_size(usual)
    assert attempts == [1]
    assert "job 'job' (plain) waits for a thread: can't start new thread" in caplog.text
