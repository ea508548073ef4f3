"""What becomes of a job that is cancelled while its handler runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.workers.running import AT_ONCE, LEASE, Recorder, forever, outcome, running
from tests.workers.worker.listening import HOUR, Listener
from workers import WorkerOptions
from workers.errors import StorageError
from workers.jobs import CancelResult, JobEvent, JobEventKind, JobOutcome, JobState, OutcomeKind
from workers.storage.memory import MemoryStorage
from workers.storage.subscribers import BufferedSubscription
from workers.testing import steps
from workers.testing.faults import counting
from workers.testing.steps import until
from workers.worker import Worker
from workers.worker.events import WorkerEventKind as Kind
from workers.worker.handlers import Job, SignalReason


async def test_a_cancelled_job_is_not_retried() -> None:
    """The handler is told `cancelled` and cancelled; its job is cancelled, attempts left or not, and that is told."""
    storage, recorder, listener = MemoryStorage(), Recorder(), Listener()
    await steps.enqueue(storage, steps.job("job", max_attempts=5))
    async with running(
        Worker(storage, {"work": listener}, lease=LEASE, observers=[recorder], options=WorkerOptions(retry=AT_ONCE))
    ):
        await recorder.seen(Kind.ACTIVE)
        assert await storage.cancel("job") is CancelResult.PROCESSING
        ended = await outcome(storage, "job")
        await recorder.seen(Kind.CANCELLED)
    assert listener.told == [(SignalReason.CANCELLED, None)]
    assert ended == JobOutcome(kind=OutcomeKind.CANCELLED)
    found = await steps.status(storage, "job")
    assert (found.state, found.attempt, found.last_error) == (JobState.CANCELLED, 1, None)
    assert recorder.of(Kind.FAILED) == []


async def test_a_cancel_request_is_noticed_at_once() -> None:
    """No renewal is due for many minutes, and yet the handler is told: a request is heard as it is made."""
    memory, recorder, listener = MemoryStorage(), Recorder(), Listener()
    storage, calls = counting(memory)
    await steps.enqueue(storage, steps.job("job"), steps.job("other"))
    async with running(Worker(storage, {"work": listener}, lease=HOUR, observers=[recorder])):
        await recorder.seen(Kind.ACTIVE, 2)
        assert await storage.cancel("job") is CancelResult.PROCESSING
        ended = await outcome(storage, "job")
        assert listener.told == [(SignalReason.CANCELLED, None)]
        assert calls["renew"] == 1  # the one that asked whether it is this attempt's request
    assert ended.kind is OutcomeKind.CANCELLED


async def test_another_attempts_cancel_request_is_no_ones() -> None:
    """A request heard late, when the attempt it was meant for is over, does not end the next one."""

    class Late(MemoryStorage):
        @asynccontextmanager
        async def cancel_requests(self) -> AsyncIterator[BufferedSubscription]:
            await recorder.seen(Kind.ACTIVE)
            yield heard

    storage, calls = counting(Late())
    recorder, heard = Recorder(), BufferedSubscription()

    async def asked(times: int) -> None:
        await until(lambda: calls["renew"] == times)

    async def outlast(job: Job) -> str:
        await asked(1)  # when listening begins
        for times in (2, 3, 4):
            heard.put(JobEvent(kind=JobEventKind.CANCEL_REQUESTED, job_id="job"))
            await asked(times)
        return "undisturbed"

    await steps.enqueue(storage, steps.job("job"))
    async with running(Worker(storage, {"work": outlast}, lease=HOUR, observers=[recorder])):
        assert (await outcome(storage, "job")).result == b'"undisturbed"'


async def test_cancel_requests_are_listened_for_again() -> None:
    """A storage that cannot tell of them is reported and asked again; the worker goes on meanwhile."""

    class Deaf(MemoryStorage):
        refusals = 1

        @asynccontextmanager
        async def cancel_requests(self) -> AsyncIterator[BufferedSubscription]:
            if self.refusals:
                self.refusals -= 1
                raise StorageError("no such channel")
            async with super().cancel_requests() as requests:
                listening.set()
                yield requests

    storage, recorder, listening = Deaf(), Recorder(), asyncio.Event()
    await steps.enqueue(storage, steps.job("job"))
    async with running(Worker(storage, {"work": forever}, lease=HOUR, observers=[recorder])):
        await recorder.seen(Kind.ACTIVE)
        assert isinstance((await recorder.seen(Kind.ERROR)).error, StorageError)
        await listening.wait()
        await storage.cancel("job")
        assert (await outcome(storage, "job")).kind is OutcomeKind.CANCELLED


async def test_a_result_returned_first_completes_a_cancelled_job() -> None:
    """A handler that ends well although it was cancelled has done its work."""
    storage, recorder = MemoryStorage(), Recorder()

    async def finish_anyway(job: Job) -> str:
        reason = await _told(job)
        return f"done, though {reason}"

    await steps.enqueue(storage, steps.job("job"))
    async with running(Worker(storage, {"work": finish_anyway}, lease=LEASE, observers=[recorder])):
        await recorder.seen(Kind.ACTIVE)
        await storage.cancel("job")
        assert (await outcome(storage, "job")).result == b'"done, though cancelled"'


async def test_a_cancelled_handler_may_clean_up() -> None:
    """The request, repeated by every renewal, cancels once: what the handler awaits afterwards is left alone."""
    storage, calls = counting(MemoryStorage())
    recorder = Recorder()
    cleaned = asyncio.Event()

    async def clean_up(job: Job) -> None:
        try:
            await forever(job)
        finally:
            asked = calls["renew"]
            await until(lambda: calls["renew"] >= asked + 3)
            cleaned.set()

    await steps.enqueue(storage, steps.job("job"))
    async with running(Worker(storage, {"work": clean_up}, lease=LEASE, observers=[recorder])):
        await recorder.seen(Kind.ACTIVE)
        await storage.cancel("job")
        await recorder.seen(Kind.CANCELLED)
    assert cleaned.is_set()


async def _told(job: Job) -> SignalReason:
    try:
        return await job.signal.wait()
    except asyncio.CancelledError:
        return await job.signal.wait()
