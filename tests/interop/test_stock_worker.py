"""A stock Python `bullmq.Worker` runs our handlers through `as_processor`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta

import bullmq
import pytest

from tests.patience import PATIENCE_SECONDS
from workers import EnqueueStatus, JobState, JobStatus, Retry, RetryPolicy, Snooze, UnrecoverableError
from workers.jobs import DROP, TERMINAL_EVENTS, ErrorInfo, Failed, JobEventKind, NewJob, Retention
from workers.storage.bullmq import BullMQStorage, as_processor
from workers.storage.on_redis import ownership
from workers.worker.handlers import Job


@pytest.fixture
async def storage(redis_url: str) -> AsyncIterator[BullMQStorage]:
    storage = BullMQStorage(redis_url, f"stock-{uuid.uuid4().hex}")
    await storage.connect()
    yield storage
    await storage.disconnect()


@asynccontextmanager
async def stock_worker(
    url: str, storage: BullMQStorage, handler: Callable[[Job], Awaitable[object]]
) -> AsyncIterator[None]:
    worker = bullmq.Worker(storage.queue, as_processor(handler), {"connection": url, "autorun": False})
    running = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        await worker.close()
        await asyncio.gather(running, return_exceptions=True)


async def run_to_the_end(
    url: str, storage: BullMQStorage, handler: Callable[[Job], Awaitable[object]], job: NewJob
) -> JobStatus:
    """The job's status after a stock worker ran it until it had ended for good; a record of it must be left."""
    status = await status_at_the_end(url, storage, handler, job)
    assert status is not None
    return status


async def status_at_the_end(
    url: str, storage: BullMQStorage, handler: Callable[[Job], Awaitable[object]], job: NewJob
) -> JobStatus | None:
    """The job's status, if a record of it is left, after a stock worker ran it until it had ended for good."""
    async with asyncio.timeout(PATIENCE_SECONDS), storage.subscribe(job.id) as events:
        await storage.enqueue([job])
        async with stock_worker(url, storage, handler):
            while (await events.get()).kind not in TERMINAL_EVENTS:
                pass
    [status] = await storage.status([job.id])
    return status


async def test_success(storage: BullMQStorage, redis_url: str) -> None:
    """The handler gets our job with the decoded payload, and its result is stored."""
    seen: list[Job] = []

    async def handler(job: Job) -> object:
        seen.append(job)
        return {"doubled": 42}

    new = NewJob(id="a:b", name="double", payload=b'{"n":21}', max_attempts=4)
    status = await run_to_the_end(redis_url, storage, handler, new)
    assert status.state is JobState.COMPLETED
    [job] = seen
    assert (job.id, job.name, job.payload, job.attempt, job.max_attempts) == ("a:b", "double", {"n": 21}, 1, 4)
    outcome = await storage.result("a:b")
    assert outcome is not None
    assert outcome.result == b'{"doubled":42}'


async def test_its_queue_is_opened(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """One that the Python package alone has written is none of Bull."""
    queue = bullmq.Queue(f"stock-{uuid.uuid4().hex}", {"connection": redis_url})
    for options in ({}, {"attempts": 3}, {"delay": 3_600_000}, {"priority": 2}):
        await queue.add("mail", {"n": 1}, options)
    await queue.close()
    storage = BullMQStorage(redis_url, queue.name)
    await storage.connect()
    await storage.disconnect()
    assert [record for record in caplog.records if record.name == ownership.__name__] == []


async def test_retries(storage: BullMQStorage, redis_url: str) -> None:
    """`Retry` puts the job aside: uncounted ones repeat the attempt, counted ones use it up."""
    attempts: list[int] = []

    async def handler(job: Job) -> object:
        attempts.append(job.attempt)
        if len(attempts) == 1:
            raise Retry("busy", delay=timedelta(milliseconds=10), counted=False)
        raise Retry("failed", delay=timedelta(milliseconds=10))

    new = NewJob(id="again", name="n", payload=b"{}", max_attempts=2)
    status = await run_to_the_end(redis_url, storage, handler, new)
    assert attempts == [1, 1, 2]
    assert status.last_error is not None
    assert (status.state, status.attempt, status.last_error.message) == (JobState.FAILED, 2, "failed")


async def test_a_snoozed_job_of_a_stock_producer(storage: BullMQStorage, redis_url: str) -> None:
    """It has no back-off, which is at once for failures only: a snooze waits by the processor's policy."""

    async def handler(job: Job) -> object:
        raise Snooze

    queue = bullmq.Queue(storage.queue, {"connection": redis_url})
    await queue.add("n", {}, {"jobId": "busy"})
    await queue.close()
    hour = RetryPolicy(initial=timedelta(hours=1), maximum=timedelta(hours=1), jitter=0)
    processor = as_processor(handler, retry=hour)
    worker = bullmq.Worker(storage.queue, processor, {"connection": redis_url, "autorun": False})
    async with asyncio.timeout(PATIENCE_SECONDS), storage.subscribe("busy") as events:
        running = asyncio.create_task(worker.run())
        while (await events.get()).kind is not JobEventKind.FAILING:
            pass
    await worker.close()
    await asyncio.gather(running, return_exceptions=True)
    [status] = await storage.status(["busy"])
    assert status is not None
    assert status.next_run_at is not None
    assert status.next_run_at - status.created_at > timedelta(minutes=59)
    assert status.last_error is None


async def test_unrecoverable(storage: BullMQStorage, redis_url: str) -> None:
    """`UnrecoverableError` fails the job at once, whatever attempts are left."""

    async def handler(job: Job) -> object:
        raise UnrecoverableError("no such thing")

    new = NewJob(id="never", name="n", payload=b"{}", max_attempts=5)
    status = await run_to_the_end(redis_url, storage, handler, new)
    assert status.last_error is not None
    assert (status.state, status.attempt, status.last_error.message) == (JobState.FAILED, 1, "no such thing")


@pytest.mark.parametrize("keep", [None, timedelta(minutes=1), DROP], ids=["its own", "a minute", "none"])
async def test_a_record_of_a_failure(storage: BullMQStorage, redis_url: str, keep: Retention | None) -> None:
    """With `keep=DROP` no record is left, and the id is free; any other `keep` leaves the job's own retention."""

    async def handler(job: Job) -> object:
        raise UnrecoverableError("no such thing", keep=keep)

    kept = NewJob(id="kept", name="n", payload=b"{}")
    await storage.enqueue([kept])
    [held] = await storage.claim("ours", leases={"*": timedelta(minutes=1)}, limit=1)
    await storage.settle([Failed(claim=held, error=ErrorInfo(type="ValueError", message="no"))])
    new = NewJob(id="never", name="n", payload=b"{}", max_attempts=5)
    status = await status_at_the_end(redis_url, storage, handler, new)
    assert (status is None) is (keep is DROP)
    assert (await storage.status([kept.id])) != [None], "the record of another failure stays"
    [again] = await storage.enqueue([new])
    assert again.status is EnqueueStatus.QUEUED
