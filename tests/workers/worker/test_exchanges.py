"""Workers whose claims travel with their settlements."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from datetime import timedelta

import pytest

from tests.workers.running import Recorder, running
from tests.workers.worker.stopping import assert_released
from workers import WorkerOptions
from workers.errors import StorageUnavailable
from workers.jobs import JobState, Settlement
from workers.storage.abilities import Exchange
from workers.storage.memory import MemoryStorage
from workers.testing import steps
from workers.testing.faults import RandomFaults, counting, faulty
from workers.testing.steps import PATIENCE, until
from workers.worker import Worker
from workers.worker.events import WorkerEventKind as Kind
from workers.worker.handlers import Job


class ExchangingStorage(MemoryStorage):
    """Settles and claims in one call; `let` holds its answers back. `asked` is what it was asked: ends and limit."""

    exchanges_at_once = 2

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, int]] = []
        self.let = asyncio.Event()
        self.let.set()
        self.leaves_it = False

    async def settle_and_claim(
        self, settlements: Sequence[Settlement], worker_id: str, *, leases: Mapping[str, timedelta], limit: int
    ) -> Exchange:
        self.asked.append((len(settlements), limit))
        outcomes = await self.settle(settlements)
        if self.leaves_it:
            return Exchange(outcomes=outcomes)
        claims = await self.claim(worker_id, leases=leases, limit=limit)
        await self.let.wait()
        return Exchange(outcomes=outcomes, claims=claims)


async def work(job: Job) -> None:
    """Do nothing."""


@pytest.mark.parametrize(("concurrency", "at_once"), [(1, 1), (2, 2), (10, 5)])
async def test_under_load_one_call_ends_jobs_and_brings_others(concurrency: int, at_once: int) -> None:
    """It is about half of the slots: the other half works meanwhile. A claim by itself begins it."""
    storage, recorder = ExchangingStorage(), Recorder()
    watched, calls = counting(storage)
    await steps.enqueue(storage, *(steps.job() for _ in range(20 * concurrency)))
    async with running(Worker(watched, {"work": work}, concurrency=concurrency, observers=[recorder])):
        await recorder.seen(Kind.COMPLETED, 20 * concurrency)
        await recorder.seen(Kind.DRAINED)
    assert max(limit for _, limit in storage.asked) == at_once
    assert calls["settle_and_claim"] > 4 * calls["claim"]
    assert len(recorder.of(Kind.ACTIVE)) == 20 * concurrency


async def test_two_turns_are_under_way_while_a_half_works() -> None:
    """The storage has the next one before it has answered the last one, and never more than these two."""
    storage, recorder = ExchangingStorage(), Recorder()
    storage.let.clear()
    await steps.enqueue(storage, *(steps.job(str(number)) for number in range(40)))
    async with running(Worker(storage, {"work": work}, concurrency=10, observers=[recorder])):
        await until(lambda: len(storage.asked) == 2)
        assert storage.asked == [(5, 5), (5, 5)]
        storage.let.set()
        await recorder.seen(Kind.COMPLETED, 40)


async def test_no_more_jobs_run_than_there_are_slots() -> None:
    """Whatever ends when: a slot is filled by one claim, of either kind."""
    storage, recorder, at_once = ExchangingStorage(), Recorder(), list[int]()
    runs = 0

    async def handle(job: Job) -> None:
        nonlocal runs
        runs += 1
        at_once.append(runs)
        for _ in range(int(job.id) % 7):
            await asyncio.sleep(0)
        runs -= 1

    await steps.enqueue(storage, *(steps.job(str(number)) for number in range(300)))
    async with running(Worker(storage, {"work": handle}, concurrency=5, observers=[recorder])):
        await recorder.seen(Kind.COMPLETED, 300)
    assert max(at_once) == 5


async def test_what_arrives_when_the_worker_stops_is_given_back() -> None:
    """Uncounted, before the worker has stopped; the job that was settled with it is completed."""
    storage, recorder = ExchangingStorage(), Recorder()
    await steps.enqueue(storage, *map(steps.job, ("a", "b", "c")))
    storage.let.clear()
    worker = Worker(storage, {"work": work}, concurrency=1, observers=[recorder])
    run = asyncio.create_task(worker.run())
    await until(lambda: storage.asked)
    worker.stop()
    storage.let.set()
    async with asyncio.timeout(PATIENCE):
        await run
    assert [event.claim.job_id for event in recorder.of(Kind.ACTIVE) if event.claim] == ["a"]
    assert (await steps.status(storage, "a")).state is JobState.COMPLETED
    await assert_released(storage, "b")


async def test_nothing_is_claimed_along_while_the_worker_is_not_ready() -> None:
    """Not before what it waits for has come; nothing is left un-awaited."""
    storage, recorder, ready = ExchangingStorage(), Recorder(), asyncio.Event()
    ready.set()

    def not_ready() -> Coroutine[object, object, None] | None:
        return None if ready.is_set() else wait()

    async def wait() -> None:
        await ready.wait()

    async def handle(job: Job) -> None:
        if job.id == "3":
            ready.clear()

    await steps.enqueue(storage, *(steps.job(str(number)) for number in range(8)))
    worker = Worker(
        storage, {"work": handle}, concurrency=1, observers=[recorder], options=WorkerOptions(not_ready=not_ready)
    )
    async with running(worker):
        await recorder.seen(Kind.COMPLETED, 4)
        await until(lambda: worker.running == 0)
        assert len(recorder.of(Kind.ACTIVE)) == 4
        ready.set()
        await recorder.seen(Kind.COMPLETED, 8)


async def test_a_claim_that_the_storage_leaves_is_made_by_itself() -> None:
    """However often it leaves them."""
    storage, recorder = ExchangingStorage(), Recorder()
    storage.leaves_it = True
    await steps.enqueue(storage, *(steps.job() for _ in range(40)))
    async with running(Worker(storage, {"work": work}, concurrency=4, observers=[recorder])):
        await recorder.seen(Kind.COMPLETED, 40)
    assert storage.asked


async def test_over_a_bad_connection_every_job_ends_once() -> None:
    """Lost requests and answers of turns cost time, and attempts of what was claimed with them."""
    exchanging = ExchangingStorage()
    storage, faults = faulty(exchanging, RandomFaults(7, rate=0.3, verbs=["settle_and_claim"]))
    recorder, ran = Recorder(), set[str]()

    async def handle(job: Job) -> None:
        ran.add(job.id)

    await steps.enqueue(exchanging, *(steps.job(max_attempts=50) for _ in range(60)))
    lease = timedelta(milliseconds=200)
    worker = Worker(
        storage,
        {"work": handle},
        concurrency=4,
        lease=lease,
        observers=[recorder],
        options=WorkerOptions(max_stalls=50),
    )
    async with running(worker):
        await until(lambda: len(ran) == 60)
        async with asyncio.timeout(PATIENCE):
            while (await exchanging.counts())[JobState.COMPLETED] < 60:
                await asyncio.sleep(0.02)
    assert isinstance(faults, RandomFaults)
    assert sum(faults.happened.values()) > 0
    assert any(isinstance(event.error, StorageUnavailable) for event in recorder.of(Kind.ERROR))
