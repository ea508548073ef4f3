"""Leases are kept while a job is held; a handler is told when one is lost, and when its job is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from tests.workers.running import AT_ONCE, Recorder, broken, forever, outcome, running
from workers.clock import ManualClock
from workers.errors import LossReason, StorageError, StorageUnavailable
from workers.jobs import CancelResult, Claim, JobEvent, JobEventKind, JobState, OutcomeKind, Renewal
from workers.storage.base import Storage
from workers.storage.memory import MemoryStorage
from workers.storage.sql import SqlStorage
from workers.storage.subscribers import BufferedSubscription
from workers.testing import steps
from workers.testing.faults import Faults, counting, faulty
from workers.testing.steps import PATIENCE, until
from workers.worker import Worker
from workers.worker.events import WorkerEventKind as Kind
from workers.worker.handlers import Handler, Job, SignalReason
from workers.worker.leases import LeaseKeeper

LEASE = timedelta(milliseconds=600)
"""Short, and longer than a busy machine stalls: three renewals keep it."""
HOUR = timedelta(hours=1)


class Listener:
    """A handler that runs until it is told to end, and keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[SignalReason | None, LossReason | None]] = []
        self.cancelled = asyncio.Event()

    async def __call__(self, job: Job) -> None:
        try:
            await forever(job)
        finally:
            self.told.append((job.signal.reason, job.signal.loss))
            self.cancelled.set()


async def test_a_long_job_keeps_its_lease() -> None:
    """A handler that runs for many leases is never recovered, though reapers run all the time."""
    storage, calls = counting(MemoryStorage())

    async def outlast(job: Job) -> int:
        await until(lambda: calls["renew"] >= 9)
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


async def test_a_cancelled_job_fails_and_is_not_retried() -> None:
    """The handler is told `cancelled` and cancelled; its job fails with `JobCancelledError`, attempts left or not."""
    storage, recorder, listener = MemoryStorage(), Recorder(), Listener()
    await steps.enqueue(storage, steps.job("job", max_attempts=5))
    async with running(Worker(storage, {"work": listener}, lease=LEASE, retry=AT_ONCE, observers=[recorder])):
        await recorder.seen(Kind.ACTIVE)
        assert await storage.cancel("job") is CancelResult.PROCESSING
        ended = await outcome(storage, "job")
    assert listener.told == [(SignalReason.CANCELLED, None)]
    assert ended.error is not None
    assert (ended.error.type, ended.error.message) == ("JobCancelledError", "job 'job' was cancelled")
    assert (await steps.status(storage, "job")).attempt == 1


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
    assert ended.kind is OutcomeKind.FAILED


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
        assert (await outcome(storage, "job")).kind is OutcomeKind.FAILED


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
        await recorder.seen(Kind.FAILED)
    assert cleaned.is_set()


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


async def _told(job: Job) -> SignalReason:
    try:
        return await job.signal.wait()
    except asyncio.CancelledError:
        return await job.signal.wait()
