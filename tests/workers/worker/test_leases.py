"""Leases are kept while a job is held, and a handler is told when one is lost."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from tests.workers.running import LEASE, Recorder, broken, forever, outcome, running
from tests.workers.worker.listening import HOUR, Listener
from workers.clock import ManualClock
from workers.errors import LossReason, StorageUnavailable
from workers.jobs import Claim, JobState, OutcomeKind, Renewal
from workers.storage.base import Storage
from workers.storage.memory import MemoryStorage
from workers.storage.sql import SqlStorage
from workers.testing import steps
from workers.testing.faults import Faults, counting, faulty
from workers.testing.steps import PATIENCE, until
from workers.worker import Worker
from workers.worker.events import WorkerEventKind as Kind
from workers.worker.handlers import Handler, Job, SignalReason
from workers.worker.leases import LeaseKeeper


async def test_a_long_job_keeps_its_lease() -> None:
    """A handler that runs for many leases is never recovered, though reapers run all the time."""
    storage, calls = counting(MemoryStorage())

    async def outlast(job: Job) -> int:
        await until(lambda: calls["renew"] >= 5)
        return job.attempt

    await steps.enqueue(storage, steps.job("long"))
    async with running(Worker(storage, {"work": outlast}, lease=LEASE)):
        assert (await outcome(storage, "long")).result == b"1"
    assert calls["recover"] > 1


async def test_one_call_renews_every_lease() -> None:
    """However many jobs a worker holds, each of them is in each renewal."""

    class Watched(MemoryStorage):
        async def renew(self, claims: Sequence[Claim]) -> Renewal:
            renewed.append({claim.job_id for claim in claims})
            return await super().renew(claims)

    renewed: list[set[str]] = []
    storage = Watched()
    ids = {str(number) for number in range(20)}
    await steps.enqueue(storage, *map(steps.job, ids))
    async with running(Worker(storage, {"work": forever}, concurrency=20, lease=LEASE)):
        await until(lambda: len(renewed) >= 3)
    assert renewed[0] == renewed[1] == renewed[2] == ids


async def test_the_shortest_lease_sets_the_pace() -> None:
    """A handler with a short lease of its own keeps it beside a worker's default of an hour."""
    storage = MemoryStorage()
    finish = asyncio.Event()

    async def brief(job: Job) -> None:
        await finish.wait()

    await steps.enqueue(storage, steps.job("brief", name="brief"))
    recorder = Recorder()
    worker = Worker(storage, {"brief": Handler(brief, lease=LEASE), "*": forever}, lease=HOUR, observers=[recorder])
    async with running(worker):
        await recorder.seen(Kind.ACTIVE)
        async with asyncio.timeout(PATIENCE):
            for _ in range(30):
                await asyncio.sleep(LEASE.total_seconds() / 10)
                assert not (await storage.recover(10)).requeued
        finish.set()
        await recorder.seen(Kind.COMPLETED)


async def test_a_lease_counts_from_before_the_renewal() -> None:
    """A renewal that took as long as the lease leaves nothing of it: by the answer, another may have the job."""
    storage, faults = faulty(MemoryStorage(), Faults(delay=LEASE))
    await steps.enqueue(storage, steps.job("job"))
    lost: list[tuple[Claim, LossReason]] = []
    keeper = keeper_of(storage, on_lost=lambda claim, reason: lost.append((claim, reason)))
    claim = await steps.claim_one(storage, lease=LEASE)
    keeper.hold(claim, since=time.monotonic())
    faults.delayed["renew"] = 1
    await keeper.renew_jobs(None)
    assert not keeper.holds(claim)
    faults.requests_lost["renew"] = 1
    with pytest.raises(StorageUnavailable):
        await keeper.renew_jobs(None)
    assert lost == [(claim, LossReason.ERROR)]


@pytest.mark.parametrize("answered", [True, False])
async def test_a_renewal_is_nothing_to_a_claim_dropped_meanwhile(answered: bool) -> None:
    """A job settled while its lease is renewed is neither held again, nor cancelled, nor lost."""

    class Settling(MemoryStorage):
        async def renew(self, claims: Sequence[Claim]) -> Renewal:
            renewal = await super().renew(claims)
            keeper.drop(claim)
            if not answered:
                raise StorageUnavailable("the reply was lost")
            return renewal

    storage = Settling()
    await steps.enqueue(storage, steps.job("job"))
    told: list[Claim] = []
    keeper = keeper_of(storage, on_lost=lambda claim, reason: told.append(claim), on_cancel=told.append)
    claim = await steps.claim_one(storage)
    await storage.cancel("job")
    keeper.hold(claim, since=time.monotonic())
    with contextlib.nullcontext() if answered else pytest.raises(StorageUnavailable):
        await keeper.renew_jobs(["job"])
    assert not keeper.holds(claim)
    assert told == []


async def test_a_job_taken_by_another_worker_is_given_up() -> None:
    """The handler is told `lease_lost`, taken, and cancelled; nothing is settled, and the event is told once."""
    clock = ManualClock()
    storage, recorder, listener = MemoryStorage(clock=clock), Recorder(), Listener()
    watched, calls = counting(storage)
    await steps.enqueue(storage, steps.job("job"))
    async with running(Worker(watched, {"work": listener}, lease=LEASE, observers=[recorder])):
        await recorder.seen(Kind.ACTIVE)
        await _take_over(storage, clock)
        await recorder.seen(Kind.LEASE_LOST)
        async with asyncio.timeout(PATIENCE):
            await listener.cancelled.wait()
    assert listener.told == [(SignalReason.LEASE_LOST, LossReason.TAKEN)]
    assert recorder.story("job") == [Kind.ACTIVE, Kind.LEASE_LOST]
    assert calls["settle"] == 0
    status = await steps.status(storage, "job")
    assert (status.state, status.worker_id, status.attempt) == (JobState.PROCESSING, "other", 2)


async def test_a_job_that_another_worker_completed_is_given_up() -> None:
    """The reason tells that the job is done already."""
    clock = ManualClock()
    storage, listener = MemoryStorage(clock=clock), Listener()
    recorder = Recorder()
    await steps.enqueue(storage, steps.job("job"))
    async with running(Worker(storage, {"work": listener}, lease=LEASE, observers=[recorder])):
        await recorder.seen(Kind.ACTIVE)
        await steps.apply(storage, steps.completed(await _take_over(storage, clock)))
        await recorder.seen(Kind.LEASE_LOST)
    assert listener.told == [(SignalReason.LEASE_LOST, LossReason.COMPLETED)]


async def test_what_a_handler_returns_after_losing_its_lease_is_dropped() -> None:
    """A handler that swallows the cancellation cannot complete a job it no longer holds, and is told only once."""
    clock = ManualClock()
    storage, recorder = MemoryStorage(clock=clock), Recorder()
    watched, calls = counting(storage)

    async def swallow(job: Job) -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await forever(job)
        asked = calls["renew"]
        await until(lambda: calls["renew"] >= asked + 2)  # as a handler that cleans up
        return "too late"

    await steps.enqueue(storage, steps.job("job"), steps.job("renewed meanwhile", name="beside"))
    handlers = {"work": swallow, "beside": Handler(forever, lease=HOUR)}
    worker = Worker(watched, handlers, lease=LEASE, observers=[recorder])
    async with running(worker):
        await recorder.seen(Kind.ACTIVE, 2)
        await _take_over(storage, clock)
        await recorder.seen(Kind.LEASE_LOST)
        await until(lambda: worker.running == 1)
        assert calls["settle"] == 0
    assert recorder.story("job") == [Kind.ACTIVE, Kind.LEASE_LOST]


async def test_an_outage_shorter_than_the_lease_is_survived() -> None:
    """Renewals that fail are reported; the handler goes on, and completes."""
    storage, faults = faulty(MemoryStorage())
    recorder = Recorder()
    finish = asyncio.Event()

    async def unaware(job: Job) -> int:
        await finish.wait()
        return job.attempt

    await steps.enqueue(storage, steps.job("job"))
    faults.requests_lost["renew"] = 2
    async with running(Worker(storage, {"work": unaware}, lease=timedelta(seconds=3), observers=[recorder])):
        await recorder.seen(Kind.ERROR, 2)
        finish.set()
        assert (await outcome(storage, "job")).result == b"1"
    assert Kind.LEASE_LOST not in recorder.story()


async def test_an_outage_as_long_as_the_lease_ends_the_attempt() -> None:
    """When nobody could renew until the lease must have ended, the handler is told `lease_lost`, error."""
    storage, faults = faulty(MemoryStorage())
    recorder, listener = Recorder(), Listener()
    await steps.enqueue(storage, steps.job("job"))
    broken(faults, "renew")
    async with running(Worker(storage, {"work": listener}, lease=LEASE, observers=[recorder])):
        await recorder.seen(Kind.LEASE_LOST)
        assert len(recorder.of(Kind.ERROR)) >= 2
    assert listener.told[0] == (SignalReason.LEASE_LOST, LossReason.ERROR)


async def test_an_outage_of_everything_gives_a_finished_job_up_with_its_lease() -> None:
    """A settlement that never arrives is given up once the lease must have ended; another attempt runs later."""
    storage, faults = faulty(MemoryStorage())
    recorder = Recorder()
    attempts: list[int] = []

    async def count(job: Job) -> None:
        attempts.append(job.attempt)
        if job.attempt == 1:
            broken(faults, "renew")
            broken(faults, "settle")

    await steps.enqueue(storage, steps.job("job"))
    async with running(Worker(storage, {"work": count}, lease=LEASE, observers=[recorder])):
        await recorder.seen(Kind.LEASE_LOST)
        broken(faults, "renew", down=False)
        broken(faults, "settle", down=False)
        assert (await outcome(storage, "job")).kind is OutcomeKind.COMPLETED
    assert attempts == [1, 2]


async def test_a_handler_that_blocks_the_loop_loses_its_job(tmp_path: Path) -> None:
    """A worker that cannot renew for longer than the lease is overtaken: the other's result stands, its own is lost."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    storage, recorder = SqlStorage(url), Recorder()
    await storage.migrate()
    await storage.connect()
    await steps.enqueue(storage, steps.job("job"))

    async def block(job: Job) -> str:
        other = threading.Thread(target=lambda: asyncio.run(_complete_elsewhere(url)))
        other.start()
        other.join(PATIENCE)  # on purpose in the event loop: nothing of this worker runs meanwhile
        return "ours"

    worker = Worker(storage, {"work": block}, lease=LEASE, observers=[recorder])
    async with running(worker):
        lost = await recorder.seen(Kind.LEASE_LOST)
        assert lost.claim is not None
        assert lost.claim.attempt == 1
        await until(lambda: worker.running == 0)
    ended = await storage.result("job")
    assert ended is not None
    assert ended.result == b'"theirs"'
    await storage.disconnect()


@pytest.mark.parametrize("number", [1, 2])
async def test_who_stood_still_is_not_taken_for_dead(number: int) -> None:
    """Neither by itself nor by another that stood still as long, as all processes of a machine do that is suspended."""
    storage, calls = counting(MemoryStorage())
    recorder, lease = Recorder(), timedelta(milliseconds=300)
    begun: list[int] = []

    async def stand_still(job: Job) -> None:
        begun.append(job.attempt)
        await until(lambda: len(begun) == number)
        if job.id == "job 0":
            time.sleep(2 * lease.total_seconds())  # noqa: ASYNC251 - all stand still
        passes = calls["recover"]
        await until(lambda: calls["recover"] >= passes + 2 * number)

    await steps.enqueue(storage, *(steps.job(f"job {each}") for each in range(number)))
    workers = [
        Worker(storage, {"work": stand_still}, concurrency=1, lease=lease, observers=[recorder]) for _ in range(number)
    ]
    async with running(*workers):
        await recorder.seen(Kind.COMPLETED, number)
    assert begun == [1] * number
    assert not recorder.of(Kind.STALLED)
    assert not recorder.of(Kind.LEASE_LOST)


def keeper_of(
    storage: Storage,
    *,
    on_lost: Callable[[Claim, LossReason], None] = lambda claim, reason: None,
    on_cancel: Callable[[Claim], None] = lambda claim: None,
) -> LeaseKeeper:
    """A keeper that renews when told to."""
    return LeaseKeeper(storage, interval=HOUR, on_lost=on_lost, on_cancel=on_cancel, report=lambda error: None)


async def _complete_elsewhere(url: str) -> None:
    storage = SqlStorage(url)
    await storage.connect()

    async def is_back() -> bool:
        return bool((await storage.recover(10)).requeued)

    await until(is_back)
    claim = await steps.claim_one(storage, worker_id="other")
    await steps.apply(storage, steps.completed(claim, b'"theirs"'))
    await storage.disconnect()


async def _take_over(storage: MemoryStorage, clock: ManualClock) -> Claim:
    """Another worker's claim on the one job, whose lease has expired."""
    clock.advance(LEASE)
    await storage.recover(10)
    return await steps.claim_one(storage, worker_id="other")
