"""Request and response over a queue: enqueue, and have the result as soon as it is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import cast

import pytest

from tests.workers.running import AT_ONCE, Recorder, forever, running
from workers import WorkerOptions, waiting
from workers.errors import (
    JobCancelledError,
    JobFailedError,
    JobGoneError,
    JobTimeoutError,
    MaxRetriesError,
    StorageUnavailable,
    UnrecoverableError,
)
from workers.jobs import DROP, CancelResult, EnqueueResult, EnqueueStatus, JobState, NewJob
from workers.queue import JobSpec, Queue
from workers.retention import Retention
from workers.specs import JobOptions
from workers.storage.base import Storage, Subscription
from workers.storage.memory import MemoryStorage
from workers.testing import Harness, all_cases, steps
from workers.testing.faults import counting, faulty
from workers.testing.stand_in import StandIn
from workers.testing.steps import PATIENCE, until
from workers.worker import Worker
from workers.worker.events import WorkerEventKind as Kind
from workers.worker.handlers import Handler, HandlerFunction, Job

MINUTE = timedelta(minutes=1)
LARGE = "x" * 5_000
ORDINARY = next(case for case in all_cases() if not case.needs)


class Watched(StandIn):
    """A storage that counts its subscribers, notes what they did, and, `deaf`, tells them nothing."""

    def __init__(self, storage: Storage, *, deaf: bool = False) -> None:
        super().__init__(storage)
        self._deaf = deaf
        self.subscribers = 0
        self.story: list[str] = []

    @asynccontextmanager
    async def subscribe(self, job_id: str) -> AsyncIterator[Subscription]:
        self.subscribers += 1
        try:
            async with self._storage.subscribe("another job" if self._deaf else job_id) as subscription:
                self.story.append("subscribed")
                yield subscription
        finally:
            self.subscribers -= 1

    async def enqueue(self, jobs: Sequence[NewJob], *, connection: object | None = None) -> list[EnqueueResult]:
        results = await self._storage.enqueue(jobs, connection=connection)
        self.story += ["enqueued"] * len(jobs)
        return results


async def double(job: Job) -> object:
    assert isinstance(job.payload, int)
    return job.payload * 2


@asynccontextmanager
async def serving(
    harness: Harness, handler: HandlerFunction | Handler, *, concurrency: int = 10
) -> AsyncIterator[tuple[Queue, Recorder]]:
    """A client of a queue that another client's worker serves."""
    storage, recorder = await harness.open(), Recorder()
    elsewhere = await harness.open(storage.queue)
    worker = Worker(
        elsewhere, {"*": handler}, concurrency=concurrency, observers=[recorder], options=WorkerOptions(retry=AT_ONCE)
    )
    async with Queue(storage) as queue, running(worker):
        yield queue, recorder


async def test_the_result_comes_back(harness: Harness) -> None:
    """The waiter has what the handler in another client returned, decoded; `None` too."""
    async with serving(harness, double) as (queue, _):
        assert await queue.enqueue_and_wait(21) == 42
    async with serving(harness, lambda job: None) as (queue, _):
        assert await queue.enqueue_and_wait("é", id="a/b:c") is None


async def test_many_waiters_have_their_own_results(harness: Harness) -> None:
    """A hundred waiters at once each get the result of their own job, and leave no task behind."""
    before = asyncio.all_tasks()
    async with serving(harness, double, concurrency=50) as (queue, _):
        results = await asyncio.gather(*(queue.enqueue_and_wait(number) for number in range(100)))
    async with harness:
        pass
    assert results == [2 * number for number in range(100)]
    assert asyncio.all_tasks() == before


async def test_waiters_of_one_id_share_its_one_run(harness: Harness) -> None:
    """Duplicates of a running job wait for its end, each for itself; one that is cancelled disturbs no other."""
    released = asyncio.Event()

    async def answer(job: Job) -> object:
        await released.wait()
        return job.payload

    async with serving(harness, answer) as (queue, recorder):
        waiters = [asyncio.create_task(queue.enqueue_and_wait("first", id="job")) for _ in range(3)]
        await recorder.seen(Kind.ACTIVE)
        late = asyncio.create_task(queue.enqueue_and_wait("late", id="job"))
        waiters[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiters[0]
        released.set()
        async with asyncio.timeout(PATIENCE):
            assert await asyncio.gather(*waiters[1:], late) == ["first"] * 3
        assert len(recorder.of(Kind.ACTIVE)) == 1


async def test_a_stored_result_is_returned_at_once(harness: Harness) -> None:
    """The result of a job that completed before comes without another run, also with no worker there."""
    storage = await harness.open()
    async with Queue(storage) as queue:
        async with running(Worker(storage, {"*": double})):
            assert await queue.enqueue_and_wait(1, id="job") == 2
        assert await queue.enqueue_and_wait(5, id="job") == 2
        assert await queue.get_result("job") == 2


async def test_a_retry_is_no_answer(harness: Harness) -> None:
    """The waiter of a job that fails twice has the result of its third run."""

    async def third_time(job: Job) -> object:
        if job.attempt < 3:
            raise ValueError("not yet")
        return job.attempt

    async with serving(harness, third_time) as (queue, recorder):
        assert await queue.enqueue_and_wait(None) == 3
        await recorder.seen(Kind.COMPLETED)
        assert len(recorder.of(Kind.FAILING)) == 2


async def test_a_failure_is_told_with_its_cause(harness: Harness) -> None:
    """The waiter gets type and message of the last error, as `MaxRetriesError` if it used up the attempts."""

    async def refuse(job: Job) -> object:
        if job.payload == "now":
            raise UnrecoverableError("never")
        raise ValueError("bad luck")

    async with serving(harness, refuse) as (queue, _):
        with pytest.raises(MaxRetriesError, match="bad luck") as exhausted:
            await queue.enqueue_and_wait("later", id="later", max_attempts=2)
        with pytest.raises(JobFailedError, match="never") as unrecoverable:
            await queue.enqueue_and_wait("now")
        with pytest.raises(MaxRetriesError, match="bad luck"):
            await queue.get_result("later")
    assert unrecoverable.type is JobFailedError
    for caught, told in ((exhausted, ("ValueError", True)), (unrecoverable, ("UnrecoverableError", False))):
        assert caught.value.original is not None
        assert (caught.value.original.type, caught.value.original.exhausted) == told


async def test_an_id_that_failed_is_waited_for_anew(harness: Harness) -> None:
    """The end of an earlier generation is not taken for the end of the one just enqueued."""

    async def at_last(job: Job) -> object:
        if job.payload == "first":
            raise UnrecoverableError("no")
        return job.payload

    async with serving(harness, at_last) as (queue, _):
        with pytest.raises(JobFailedError):
            await queue.enqueue_and_wait("first", id="job")
        assert await queue.enqueue_and_wait("second", id="job") == "second"


async def test_a_failure_without_a_record_is_told_and_done_again(harness: Harness) -> None:
    """The waiter of a job that fails with `keep=DROP` learns that it failed, and the id is free for the next one."""

    async def refuse(job: Job) -> object:
        if job.payload == "first":
            raise UnrecoverableError("no", keep=DROP)
        return job.payload

    async with serving(harness, refuse) as (queue, recorder):
        with pytest.raises(JobFailedError, match="its error was not kept") as caught:
            await queue.enqueue_and_wait("first", id="job", result_ttl=MINUTE)
        assert caught.value.original is None
        assert await queue.get_status("job") is None
        failure = await recorder.seen(Kind.FAILED)
        assert isinstance(failure.error, UnrecoverableError), "observers have the error all the same"
        again = await queue.enqueue("second", id="job")
        assert again.status is EnqueueStatus.QUEUED
        await recorder.seen(Kind.COMPLETED)
        assert await queue.get_result("job") == "second"


async def test_a_cancelled_job_ends_its_waiters(harness: Harness) -> None:
    """Whoever waits for a job that is cancelled before it runs is told so at once."""
    watched = Watched(await harness.open())
    async with Queue(cast("Storage", watched)) as queue:
        waiters = [asyncio.create_task(queue.enqueue_and_wait(1, id="job")) for _ in range(2)]
        await until(lambda: watched.story.count("enqueued") == 2)
        assert await queue.cancel("job") is CancelResult.CANCELLED
        for waiter in waiters:
            with pytest.raises(JobCancelledError):
                async with asyncio.timeout(PATIENCE):
                    await waiter
        with pytest.raises(JobCancelledError):
            await queue.get_result("job")


async def test_a_job_cancelled_while_it_runs_ends_its_waiter(harness: Harness) -> None:
    """The waiter of a job whose handler was cancelled is told that, and not of a failure."""
    storage, recorder = await harness.open(), Recorder()
    # Requests to cancel come with a renewal, hence the short lease.
    worker = Worker(storage, {"*": forever}, lease=timedelta(seconds=0.6), observers=[recorder])
    async with Queue(storage) as queue, running(worker):
        waiter = asyncio.create_task(queue.enqueue_and_wait(1, id="job"))
        await recorder.seen(Kind.ACTIVE)
        assert await queue.cancel("job") is CancelResult.PROCESSING
        with pytest.raises(JobCancelledError):
            async with asyncio.timeout(PATIENCE):
                await waiter


async def test_an_applications_own_error_of_that_name_is_a_failure(harness: Harness) -> None:
    """An exception of somebody else's that is called `JobCancelledError` comes back as itself, type and message."""
    mine = type("JobCancelledError", (Exception,), {})

    async def refuse(job: Job) -> None:
        raise mine("the customer cancelled the order")

    storage = await harness.open()
    async with Queue(storage, max_attempts=1) as queue, running(Worker(storage, {"*": refuse})):
        with pytest.raises(JobFailedError) as raised:
            await queue.enqueue_and_wait(1, id="job")
        error = raised.value.original
        assert error is not None
        assert (error.type, error.message) == ("JobCancelledError", "the customer cancelled the order")
        with pytest.raises(JobFailedError):
            await queue.get_result("job")
        status = await queue.get_status("job")
        assert status is not None
        assert status.state is JobState.FAILED


async def test_a_timeout_leaves_the_job_alone(harness: Harness) -> None:
    """A waiter out of time is told so; the job is there still, and a later waiter has its result."""
    storage = await harness.open()
    async with Queue(storage) as queue:
        with pytest.raises(JobTimeoutError, match="'job'"):
            await queue.enqueue_and_wait(4, id="job", timeout=timedelta(seconds=1))
        status = await queue.get_status("job")
        assert status is not None
        assert status.state is JobState.QUEUED
        assert await queue.get_result("job") is None
        async with running(Worker(storage, {"*": double})):
            assert await queue.enqueue_and_wait(4, id="job") == 8


@pytest.mark.parametrize("payload", ["small", LARGE], ids=["small", "large"])
async def test_a_result_that_is_not_kept_comes_with_the_end(harness: Harness, payload: str) -> None:
    """Who waits for a duplicate whose record vanishes with its completion has its result, or learns that it is lost."""
    released = asyncio.Event()

    async def answer(job: Job) -> object:
        await released.wait()
        return job.payload

    async with serving(harness, answer) as (queue, recorder):
        await queue.enqueue_many([JobSpec(payload=payload, id="job", keep_completed=DROP)])
        await recorder.seen(Kind.ACTIVE)
        watched = Watched(queue.storage)
        async with Queue(cast("Storage", watched)) as client:
            waiter = asyncio.create_task(client.enqueue_and_wait(1, id="job"))
            await until(lambda: "enqueued" in watched.story)
            released.set()
            async with asyncio.timeout(PATIENCE):
                if payload == "small" and harness.capabilities.results_told:
                    assert await waiter == "small"
                else:
                    with pytest.raises(JobGoneError, match="not kept"):
                        await waiter


@pytest.mark.parametrize(
    ("keep", "payload"),
    [(1, "small"), (1, LARGE), (DROP, "small")],
    ids=["a small one, a millisecond", "a large one, a millisecond", "a small one, not at all"],
)
async def test_a_waiter_needs_no_long_retention(harness: Harness, keep: Retention | int, payload: str) -> None:
    """Twenty jobs of one id are waited for, one after the other, however shortly each is kept."""
    if payload != LARGE and not harness.capabilities.results_told:
        pytest.skip("declared: results_told")
    async with serving(harness, lambda job: job.payload) as (queue, _):
        for number in range(20):
            job_id = f"job-{number if payload == LARGE else number // 2}"
            kept: JobOptions = {"keep_completed": DROP} if keep is DROP else {"result_ttl": 1}
            async with asyncio.timeout(PATIENCE):
                assert await queue.enqueue_and_wait(payload, id=job_id, **kept) == payload


async def test_an_end_before_its_own_beginning_is_no_answer() -> None:
    """The result of an older job of the id, which ended while the waiter enqueued its own, is not taken for its own."""
    memory = MemoryStorage()
    await steps.enqueue(memory, steps.job("job", keep=DROP))
    older = await steps.claim_one(memory)

    class Late(Watched):
        async def enqueue(self, jobs: Sequence[NewJob], *, connection: object | None = None) -> list[EnqueueResult]:
            await steps.apply(memory, steps.completed(older, b"1"))
            answers = await memory.enqueue(jobs)
            await steps.apply(memory, steps.completed(await steps.claim_one(memory), b"2"))
            return answers

    queue = Queue(cast("Storage", Late(memory)))
    assert await queue.enqueue_and_wait(None, id="job", keep_completed=DROP) == 2


async def test_an_end_is_remembered_while_the_storage_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter that was told the result and could not look has it as soon as it sees that nothing is left."""
    monkeypatch.setattr(waiting, "LOOK_AGAIN_SECONDS", 0.02)
    memory = MemoryStorage()
    storage, faults = faulty(memory)
    faults.requests_lost["result"] = 2
    waiter = asyncio.create_task(Queue(storage).enqueue_and_wait(1, id="job", keep_completed=DROP))
    await _queued(Queue(memory), "job")
    await steps.apply(memory, steps.completed(await steps.claim_one(memory), b"7"))
    async with asyncio.timeout(PATIENCE):
        assert await waiter == 7


async def test_the_time_of_a_result_can_be_changed(harness: Harness) -> None:
    """`update_result_ttl` tells whether there was a finished job; what is no duration is refused."""
    async with serving(harness, double) as (queue, _):
        await queue.enqueue_and_wait(1, id="job")
        with pytest.raises(ValueError, match="above zero"):
            await queue.update_result_ttl("job", 0)
        if harness.capabilities.result_ttl_updates:
            assert await queue.update_result_ttl("job", MINUTE)
            assert not await queue.update_result_ttl("unknown", 60_000)


async def test_waiters_that_leave_are_forgotten() -> None:
    """Whether a waiter was cancelled, ran out of time or got its answer: its subscription is gone."""
    watched = Watched(MemoryStorage())
    storage = cast("Storage", watched)
    queue = Queue(storage)
    cancelled = [asyncio.create_task(queue.enqueue_and_wait(1)) for _ in range(5)]
    late = [asyncio.create_task(queue.enqueue_and_wait(1, timeout=timedelta(seconds=0.5))) for _ in range(5)]
    await until(lambda: watched.subscribers == 10)
    for waiter in cancelled:
        waiter.cancel()
    ends = await asyncio.gather(*cancelled, *late, return_exceptions=True)
    assert [type(end) for end in ends] == [asyncio.CancelledError] * 5 + [JobTimeoutError] * 5
    async with running(Worker(storage, {"*": double})):
        assert await queue.enqueue_and_wait(1) == 2
    assert watched.subscribers == 0


async def test_an_end_that_nobody_told_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter that hears nothing looks for itself, and goes on when the storage does not answer."""
    monkeypatch.setattr(waiting, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(waiting, "LOOK_AGAIN_SECONDS", 0.02)
    memory = MemoryStorage()
    unreliable, faults = faulty(cast("Storage", Watched(memory, deaf=True)))
    faults.requests_lost["result"] = 2
    waiter = asyncio.create_task(Queue(unreliable).enqueue_and_wait(1, id="job"))
    await until(lambda: faults.requests_lost["result"] == 0)
    async with running(Worker(memory, {"*": double})), asyncio.timeout(PATIENCE):
        assert await waiter == 2


async def test_a_removed_job_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waiter of a job that was removed without a trace is told so, before its time is out."""
    monkeypatch.setattr(waiting, "LOOK_SECONDS", 0.02)
    queue = Queue(MemoryStorage())
    waiter = asyncio.create_task(queue.enqueue_and_wait(1, id="job"))
    await _queued(queue, "job")
    assert await queue.storage.remove(["job"]) == 1
    with pytest.raises(JobGoneError, match="removed"):
        async with asyncio.timeout(PATIENCE):
            await waiter


async def test_waiting_asks_the_storage_for_nothing() -> None:
    """While a job runs and is retried its waiter makes no call; its end costs one."""
    memory = MemoryStorage()
    storage, calls = counting(memory)
    queue = Queue(storage)
    waiter = asyncio.create_task(queue.enqueue_and_wait(1, id="job"))
    await _queued(Queue(memory), "job")
    for _ in range(3):
        await steps.apply(memory, steps.retried(await steps.claim_one(memory)))
    await steps.apply(memory, steps.completed(await steps.claim_one(memory), b"7"))
    assert await waiter == 7
    assert calls == {"connect": 1, "enqueue": 1, "result": 1}


async def test_a_storage_that_is_away_is_reported() -> None:
    """A job that may not have been enqueued is not waited for."""
    storage, faults = faulty(MemoryStorage())
    faults.requests_lost["enqueue"] = 1
    with pytest.raises(StorageUnavailable):
        await Queue(storage).enqueue_and_wait(1)


@pytest.mark.parametrize("timeout", [timedelta(0), -MINUTE], ids=["zero", "negative"])
async def test_no_time_is_no_timeout(timeout: timedelta) -> None:
    """A timeout that is not above zero is a mistake, and nothing is enqueued."""
    storage, calls = counting(MemoryStorage())
    with pytest.raises(ValueError, match="timeout must be above zero"):
        await Queue(storage).enqueue_and_wait(1, timeout=timeout)
    assert calls == {}


async def test_a_waiter_listens_before_it_enqueues() -> None:
    """A job that ends as soon as it is enqueued is heard of, because somebody listened already."""
    watched = Watched(MemoryStorage())
    storage = cast("Storage", watched)
    async with running(Worker(storage, {"*": double})):
        assert await Queue(storage).enqueue_and_wait(1) == 2
    assert watched.story == ["subscribed", "enqueued"]


async def _queued(queue: Queue, job_id: str) -> None:
    """The job is in the queue."""
    await until(lambda: queue.get_status(job_id))
