"""What others may write into a queue is set aside and told once, or named and mended when asked; the rest goes on."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, Final

import pytest

from tests.workers.running import AT_ONCE, Recorder, done, outcome, running
from tests.workers.storage.redis.steps import LEASES, THROTTLED, key
from workers import JobState, WorkerOptions
from workers.errors import StorageDamaged
from workers.jobs import OutcomeKind, RepairOutcome
from workers.storage.redis import RedisStorage
from workers.testing.steps import ERROR, claim_one, completed, enqueue, failed, job, state
from workers.worker import Worker
from workers.worker.events import WorkerEventKind as Kind
from workers.worker.handlers import Job

MOMENT: Final = timedelta(microseconds=1)


@pytest.mark.parametrize("name", ["jobs", "ready", "marks", "quarantine", THROTTLED])
async def test_a_key_in_the_way_is_named_until_it_is_repaired(name: str, storage: RedisStorage, client: Any) -> None:
    """The worker goes on looking, and what waits runs once somebody has asked for the repair."""
    await client.set(key(storage, name), "somebody's")
    recorder = Recorder()
    worker = Worker(
        storage,
        {"work": done},
        lease=timedelta(milliseconds=300),
        observers=[recorder],
        options=WorkerOptions(retry=AT_ONCE),
    )
    async with running(worker):
        error = (await recorder.seen(Kind.ERROR)).error
        assert isinstance(error, StorageDamaged)
        assert f"{key(storage, name)} is a string" in str(error)
        moved = await storage.repair()
        assert [(one.id, one.outcome) for one in moved] == [(name, RepairOutcome.MOVED)]
        await enqueue(storage, job("waits"))
        assert (await outcome(storage, "waits")).kind is OutcomeKind.COMPLETED
    assert await client.get(f"{key(storage, 'quarantine')}:{name}") == b"somebody's"
    assert [one.outcome for one in await storage.repair(drop=True)] == [RepairOutcome.DROPPED]
    assert await storage.quarantine() == []


async def test_an_end_waits_for_the_repair(storage: RedisStorage, client: Any) -> None:
    """A handler that is done while a key is in the way has not worked in vain."""
    runs = 0

    async def handler(_: Job) -> str:
        nonlocal runs
        runs += 1
        await client.rename(key(storage, "meta"), key(storage, "aside"))
        await client.set(key(storage, "meta"), "somebody's")
        return "done"

    recorder = Recorder()
    await enqueue(storage, job("job"))
    async with running(Worker(storage, {"work": handler}, observers=[recorder])):
        await recorder.seen(Kind.ERROR)
        await client.rename(key(storage, "aside"), key(storage, "meta"))
        assert (await outcome(storage, "job")).kind is OutcomeKind.COMPLETED
    assert runs == 1


async def test_a_run_that_cannot_be_read_fails_its_job_and_can_be_repaired(storage: RedisStorage, client: Any) -> None:
    """With its lease; it is told once, and comes back as it was enqueued."""
    await enqueue(storage, job("bad", max_attempts=7, ordering_key="key"), job("next", ordering_key="key"))
    bad = await claim_one(storage, lease=MOMENT)
    await client.hset(key(storage, "runs"), "bad", b"garbage")
    recovery = await storage.recover(10)
    assert recovery.failed == ("bad",)
    assert await state(storage, "bad") is JobState.FAILED
    [told] = storage.news()
    assert (told.id, [entry.id for entry in await storage.quarantine()]) == ("bad", ["bad"])
    assert (await claim_one(storage)).job_id == "next"  # nobody has its ordering key any more
    assert [(one.id, one.outcome) for one in await storage.repair()] == [("bad", RepairOutcome.REQUEUED)]
    assert (await storage.quarantine(), storage.news()) == ([], [])
    [settled] = await storage.settle([completed(bad)])
    assert settled.reason is not None
    assert await state(storage, "bad") is JobState.QUEUED
    assert await storage.claim("w", leases=LEASES, limit=5) == []  # the next one has its ordering key now


@pytest.mark.parametrize("damage", [b"garbage", None], ids=["garbage", "missing"])
async def test_a_record_that_cannot_be_read_is_kept_until_it_is_dropped(
    damage: bytes | None, storage: RedisStorage, client: Any
) -> None:
    """There is nothing that could be queued again."""
    await enqueue(storage, job("bad"))
    if damage is None:
        await client.hdel(key(storage, "jobs"), "bad")
    else:
        await client.hset(key(storage, "jobs"), "bad", damage)
    assert await storage.claim("w", leases=LEASES, limit=5) == []
    assert [one.outcome for one in await storage.repair()] == [RepairOutcome.KEPT]
    assert [one.outcome for one in await storage.repair(drop=True)] == [RepairOutcome.DROPPED]
    assert [name async for name in client.scan_iter(key(storage, "quarantine*"))] == []


async def test_what_only_clients_read_of_a_record_ends_no_worker(storage: RedisStorage, client: Any) -> None:
    """A record that breaks off behind its head, and one under an id that is no text, fail or run; others run."""
    await enqueue(storage, job("short"), job("good"))
    record = await client.hget(key(storage, "jobs"), "short")
    await client.hset(key(storage, "jobs"), "short", record[: record.index(b"work") + 6])
    [member] = [one for one in await client.zrange(key(storage, "ready"), 0, -1) if one.endswith(b"good")]
    await client.hset(key(storage, "jobs"), b"\xff\xfe", await client.hget(key(storage, "jobs"), "good"))
    await client.zadd(key(storage, "ready"), {member.removesuffix(b"good") + b"\xff\xfe": 0})
    recorder = Recorder()
    async with (
        running(Worker(storage, {"work": done}, observers=[recorder], options=WorkerOptions(retry=AT_ONCE))),
        asyncio.timeout(20),
    ):
        for job_id in ("good", "\udcff\udcfe"):
            assert (await outcome(storage, job_id)).kind is OutcomeKind.COMPLETED
        short = await outcome(storage, "short")
    assert short.kind is OutcomeKind.FAILED
    assert recorder.of(Kind.ERROR) == []


@pytest.mark.parametrize("place", ["inf", "nan", "1e300", "x"])
async def test_a_place_that_is_no_number_is_not_counted_on(place: str, storage: RedisStorage, client: Any) -> None:
    """Jobs stand in the order in which they came, at times that are."""
    await client.hset(key(storage, "meta"), "place", place)
    await enqueue(storage, job("first"), job("second"))
    assert [claim.job_id for claim in await storage.claim("w", leases=LEASES, limit=5)] == ["first", "second"]


async def test_times_and_errors_that_are_none_end_nobody(storage: RedisStorage, client: Any) -> None:
    """What is due never, a worker seen in no year, an error that is none: waits and lists go on."""
    await enqueue(storage, job("bad"))
    await storage.settle([failed(await claim_one(storage))])
    run = bytearray(await client.hget(key(storage, "runs"), "bad"))
    run[run.index(ERROR.type.encode())] = 0xFF
    await client.hset(key(storage, "runs"), "bad", bytes(run))
    await client.zadd(key(storage, "scheduled"), {b"foreign": float("inf")})
    await client.zadd(key(storage, "workers"), {b"late": 1e300})
    await storage.wait(["work"], timeout=MOMENT)
    assert "late" in [worker.id for worker in await storage.workers()]
    [found] = (await storage.list(JobState.FAILED)).jobs
    assert found.last_error is not None
    assert found.last_error.type == "CorruptRecord"
