"""Jobs of workers that died come back, and what has outlived its retention goes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from tests import warm
from tests.workers.running import LEASE, Recorder, broken, forever, outcome, running
from workers.clock import ManualClock
from workers.jobs import JobState, OutcomeKind
from workers.storage.base import Storage
from workers.storage.memory import MemoryStorage
from workers.storage.sql import SqlStorage
from workers.testing import steps
from workers.testing.faults import counting, faulty
from workers.testing.steps import PATIENCE, until
from workers.worker import Worker
from workers.worker.events import WorkerEventKind as Kind
from workers.worker.handlers import Job
from workers.worker.maintenance import BATCH, SWEPT_AT_ONCE, Reaper

MINUTE = timedelta(minutes=1)


class Hasty(MemoryStorage):
    """Wants to be recovered often."""

    capabilities = replace(MemoryStorage.capabilities, recovery_interval=timedelta(milliseconds=1))  # type: ignore[misc]  # final


async def test_one_pass_recovers_everything_that_expired() -> None:
    """More dead jobs than a batch are all back after one pass, in their order, told by their ids."""
    clock, recorder = ManualClock(), Recorder()
    storage, calls = counting(MemoryStorage(clock=clock))
    ids = [f"{number:04}" for number in range(2 * BATCH + 500)]
    await steps.enqueue(storage, *map(steps.job, ids))
    await steps.claim(storage, len(ids), lease=MINUTE)
    clock.advance(MINUTE)
    await Reaper(storage, observers=[recorder], name="r1").reap()
    assert calls["recover"] == 3
    assert [job_id for event in recorder.of(Kind.STALLED) for job_id in event.job_ids] == ids
    assert {event.worker_id for event in recorder.events} == {"r1"}
    assert steps.ids(await steps.claim(storage, len(ids))) == ids


async def test_live_leases_are_left_alone() -> None:
    """A pass touches nothing that is held, and tells nothing."""
    clock, recorder = ManualClock(), Recorder()
    storage = MemoryStorage(clock=clock)
    await steps.enqueue(storage, steps.job("held"), steps.job("dead"))
    await steps.claim(storage, lease=2 * MINUTE)
    await steps.claim(storage, lease=MINUTE)
    clock.advance(MINUTE)
    await Reaper(storage, observers=[recorder]).reap()
    assert await steps.state(storage, "held") is JobState.PROCESSING
    assert await steps.state(storage, "dead") is JobState.QUEUED
    assert [event.job_ids for event in recorder.events] == [("dead",)]


async def test_after_a_standstill_others_may_renew_first() -> None:
    """Whoever stood still as long has a pass more to renew what is over; what nobody renews is recovered then."""
    clock = ManualClock()
    storage, calls = counting(MemoryStorage(clock=clock))
    await steps.enqueue(storage, steps.job("job"))
    await steps.claim(storage, lease=MINUTE)
    reaping = asyncio.create_task(Reaper(storage, interval=timedelta(seconds=0.2)).run())
    await until(lambda: calls["recover"] == 1)
    clock.advance(MINUTE)
    time.sleep(0.5)  # noqa: ASYNC251 - all stand still
    for _ in range(5):
        await asyncio.sleep(0)
    assert calls["recover"] == 1
    await until(lambda: calls["recover"] == 2)
    assert await steps.state(storage, "job") is JobState.QUEUED
    reaping.cancel()
    await asyncio.gather(reaping, return_exceptions=True)


async def test_one_pass_sweeps_everything_that_expired() -> None:
    """Records past their retention go in batches, until none is left."""
    clock = ManualClock()
    storage, calls = counting(MemoryStorage(clock=clock))
    await _expired(storage, clock, 2 * SWEPT_AT_ONCE + 10)
    await Reaper(storage).reap()
    assert calls["sweep"] == 3
    assert (await storage.counts())[JobState.COMPLETED] == 0


async def test_a_storage_may_ask_for_more_recoveries() -> None:
    """Where recovery takes several passes they come as often as the storage says, and sweeps as before."""
    storage, calls = counting(Hasty(clock=ManualClock()))
    reaping = asyncio.create_task(Reaper(storage, interval=timedelta(hours=1)).run())
    await until(lambda: calls["recover"] >= 5)
    reaping.cancel()
    await asyncio.gather(reaping, return_exceptions=True)
    assert calls["sweep"] == 1


async def test_a_long_sweep_lets_others_work() -> None:
    """Between two batches everybody else in the process has a turn, also on a storage that never waits for anything."""
    clock = ManualClock()
    storage, calls = counting(MemoryStorage(clock=clock))
    await _expired(storage, clock, 5 * SWEPT_AT_ONCE)
    turns = []
    reaping = asyncio.create_task(Reaper(storage).reap())
    while not reaping.done():
        await asyncio.sleep(0)
        turns.append(calls["sweep"])
    await reaping
    assert set(range(1, 6)) <= set(turns), "no two batches came in one turn"


async def test_a_long_sweep_puts_off_no_recovery() -> None:
    """Leases that expire while records are removed are recovered before the last of those is gone."""
    clock = ManualClock()
    storage, calls = counting(MemoryStorage(clock=clock))
    await _expired(storage, clock, 5 * SWEPT_AT_ONCE)
    await Reaper(storage, interval=timedelta(0)).reap()
    assert calls["recover"] == calls["sweep"] == 6


async def test_a_job_that_stalls_too_often_fails() -> None:
    """The reaper's own bound counts: with `max_stalls=1` the second recovery ends the job, and is told apart."""
    clock, recorder = ManualClock(), Recorder()
    storage = MemoryStorage(clock=clock)
    reaper = Reaper(storage, max_stalls=1, observers=[recorder])
    await steps.enqueue(storage, steps.job("poison", max_attempts=10))
    for expected in (JobState.QUEUED, JobState.FAILED):
        await steps.claim_one(storage, lease=MINUTE)
        clock.advance(MINUTE)
        await reaper.reap()
        assert await steps.state(storage, "poison") is expected
    assert recorder.story() == [Kind.STALLED, Kind.FAILED]
    assert {event.job_ids for event in recorder.events} == {("poison",)}
    assert (await steps.status(storage, "poison")).last_error is not None


async def test_a_reaper_survives_an_outage() -> None:
    """A storage that does not answer is reported, and asked again at the next pass."""
    storage, faults = faulty(MemoryStorage())
    recorder = Recorder()
    await steps.enqueue(storage, steps.job("job"))
    await steps.claim_one(storage, lease=timedelta(milliseconds=1))
    broken(faults, "recover")
    reaper = Reaper(storage, interval=timedelta(milliseconds=20), observers=[recorder])
    async with steps.background(asyncio.create_task(reaper.run())):
        await recorder.seen(Kind.ERROR, 2)
        broken(faults, "recover", down=False)
        assert (await recorder.seen(Kind.STALLED)).job_ids == ("job",)


async def test_many_reapers_recover_a_job_once() -> None:
    """Reapers that come at the same moment do not count a stall twice."""
    clock, recorder = ManualClock(), Recorder()
    storage = MemoryStorage(clock=clock)
    await steps.enqueue(storage, *(steps.job() for _ in range(10)))
    await steps.claim(storage, 10, lease=MINUTE)
    clock.advance(MINUTE)
    await asyncio.gather(*(Reaper(storage, observers=[recorder]).reap() for _ in range(5)))
    assert sum(len(event.job_ids) for event in recorder.events) == 10


async def test_dead_jobs_come_back_beside_a_backlog_and_full_slots() -> None:
    """A busy worker's reaper returns a dead one's job when its lease is over, to the head of the queue."""
    storage, recorder = MemoryStorage(), Recorder()
    await steps.enqueue(storage, steps.job("dead"))
    dead = await steps.claim_one(storage, worker_id="dead worker")
    await steps.enqueue(storage, *(steps.job() for _ in range(2_000)))
    first_slot = asyncio.Event()
    ran: list[str] = []

    async def hold(job: Job) -> None:
        ran.append(job.id)
        await first_slot.wait()

    async with running(Worker(storage, {"work": hold}, concurrency=4, lease=LEASE, observers=[recorder])):
        await until(lambda: len(ran) == 4)
        await storage.renew([replace(dead, lease=LEASE)])
        assert (await recorder.seen(Kind.STALLED)).job_ids == ("dead",)
        assert len(ran) == 4, "the worker is full all the time"
        first_slot.set()
        assert (await outcome(storage, "dead")).kind is OutcomeKind.COMPLETED
    assert ran[4] == "dead"


async def test_a_reaper_that_starts_late_recovers_at_once() -> None:
    """Leases that expired while no reaper ran are recovered by the first pass, which does not wait an interval."""
    clock, recorder = ManualClock(), Recorder()
    storage = MemoryStorage(clock=clock)
    await steps.enqueue(storage, steps.job("job"))
    await steps.claim_one(storage, lease=MINUTE)
    clock.advance(MINUTE)
    reaper = Reaper(storage, interval=timedelta(hours=1), observers=[recorder])
    async with steps.background(asyncio.create_task(reaper.run())):
        await recorder.seen(Kind.STALLED)
    assert await steps.state(storage, "job") is JobState.QUEUED


async def test_the_reaper_beside_a_worker_goes_on_while_it_is_idle() -> None:
    """Passes come every half lease, jittered: not in a spin, and not only at the start."""
    storage, calls = counting(MemoryStorage())
    started = time.monotonic()
    async with running(Worker(storage, {"work": forever}, lease=LEASE)):
        await until(lambda: calls["recover"] >= 4)
        took = time.monotonic() - started
    assert took >= 3 * 0.9 * LEASE.total_seconds() / 2


async def test_a_job_that_kills_its_worker_ends_as_failed(tmp_path: Path) -> None:
    """Each death spends an attempt; after the last one the job fails, and no worker dies of it any more."""
    url, log = f"sqlite:///{tmp_path}/jobs.db", tmp_path / "runs"
    storage = SqlStorage(url)
    await storage.migrate()
    await storage.connect()
    await steps.enqueue(storage, steps.job("lethal", max_attempts=2))
    for _ in range(2):
        assert await _child(url, log) == 9
    recorder = Recorder()
    async with running(Worker(storage, {"work": forever}, lease=LEASE, observers=[recorder])):
        ended = await outcome(storage, "lethal")
        assert (await recorder.seen(Kind.FAILED)).job_ids == ("lethal",)
    assert log.read_text().splitlines() == ["lethal 1", "lethal 2"]
    assert ended.error is not None
    assert ended.error.type == "StalledError"
    assert Kind.ACTIVE not in recorder.story()
    await storage.disconnect()


async def _expired(storage: Storage, clock: ManualClock, count: int) -> None:
    """So many completed records have outlived their retention."""
    await steps.enqueue(storage, *(steps.job(keep=MINUTE) for _ in range(count)))
    await steps.apply(storage, *(steps.completed(claim) for claim in await steps.claim(storage, count)))
    clock.advance(MINUTE)


async def _child(url: str, log: Path) -> int:
    """The exit code of a worker process, which must die by its job."""
    child = await asyncio.create_subprocess_exec(warm.PYTHON, "-m", "tests.workers.worker.lethal_child", url, str(log))
    try:
        async with asyncio.timeout(3 * PATIENCE):
            return await child.wait()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
