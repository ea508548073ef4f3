"""Queues on Redis that hold what no storage of ours wrote: it is reported or set aside, and others' jobs run."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.workers.running import AT_ONCE, Recorder, done, outcome, running
from workers import WorkerOptions
from workers.errors import StorageError
from workers.jobs import JobState, NewJob, OutcomeKind
from workers.storage.bullmq import BullMQStorage
from workers.storage.redis import RedisStorage
from workers.testing.steps import claim, enqueue, job
from workers.worker import Worker
from workers.worker.events import WorkerEventKind


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Any]:
    async with Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
async def packed(redis_url: str) -> AsyncIterator[RedisStorage]:
    storage = RedisStorage(redis_url, f"test-{uuid.uuid4().hex}")
    await storage.connect()
    yield storage
    await storage.disconnect()


@pytest.fixture
async def bullmq(redis_url: str) -> AsyncIterator[BullMQStorage]:
    storage = BullMQStorage(redis_url, f"test-{uuid.uuid4().hex}")
    await storage.connect()
    yield storage
    await storage.disconnect()


ENDS = (WorkerEventKind.COMPLETED, WorkerEventKind.FAILED)


def worker_on(storage: RedisStorage | BullMQStorage, recorder: Recorder) -> Worker:
    return Worker(storage, {"work": done}, observers=[recorder], options=WorkerOptions(retry=AT_ONCE))


@pytest.mark.parametrize("damage", [b"", b"garbage", b"\xff" * 64], ids=["empty", "text", "bytes"])
async def test_damaged_packed_records(damage: bytes, packed: RedisStorage, client: Any) -> None:
    """A record that cannot be unpacked fails with a reason, a foreign member of the line is dropped, others run."""
    key = f"{{workers:{packed.queue}}}"
    await enqueue(packed, job("bad"), job("good"))
    await client.hset(f"{key}:jobs", "bad", damage)
    await client.zadd(f"{key}:ready", {b"foreign": 0, b"\xff" * 40: 0})
    recorder = Recorder()
    async with running(worker_on(packed, recorder)):
        assert (await outcome(packed, "good")).kind is OutcomeKind.COMPLETED
        bad = await outcome(packed, "bad")
    assert bad.error is not None
    assert bad.error.type == "CorruptRecord"
    assert recorder.of(WorkerEventKind.ERROR) == []


async def test_damaged_nodes_jobs(bullmq: BullMQStorage, client: Any) -> None:
    """Ids without a hash, hashes without a name, data that is no JSON and junk options fail or run; others run."""
    base = f"bull:{bullmq.queue}"
    await client.hset(f"{base}:1", mapping={"data": "{}", "opts": "{}"})
    await client.hset(f"{base}:2", mapping={"name": "work", "data": b"\x80{not json", "opts": "{}"})
    await client.hset(f"{base}:3", mapping={"name": "work", "data": "{}", "opts": b"[[\xff", "timestamp": "soon"})
    await client.hset(f"{base}:4", mapping={"name": "work"})
    await client.lpush(f"{base}:wait", "ghost", "1", "2", "3", "4")
    await enqueue(bullmq, job("good"))
    recorder = Recorder()
    async with running(worker_on(bullmq, recorder)):
        assert (await outcome(bullmq, "good")).kind is OutcomeKind.COMPLETED
        await recorder.seen(WorkerEventKind.DRAINED)
    ended = [event.claim.job_id for event in recorder.events if event.claim and event.kind in ENDS]
    assert sorted(ended) == ["1", "2", "3", "4", "ghost", "good"]
    assert {event.claim.job_id for event in recorder.of(WorkerEventKind.FAILED) if event.claim} >= {"ghost", "1", "2"}
    assert (await bullmq.counts())[JobState.PROCESSING] == 0


@pytest.mark.parametrize(
    "name", ["wait", "active", "prioritized", "delayed", "completed", "failed", "paused", "meta", "marker", "stalled"]
)
async def test_bullmq_keys_of_another_type(name: str, bullmq: BullMQStorage, client: Any) -> None:
    """Each verb answers or says what is wrong, and none hangs; when the key is taken away the queue works as before."""
    base = f"bull:{bullmq.queue}"
    await enqueue(bullmq, job("waiting"))
    exists = await client.exists(f"{base}:{name}")
    if exists:
        await client.rename(f"{base}:{name}", f"{base}:aside")
    await client.set(f"{base}:{name}", "foreign")
    refused = 0
    for call in (
        bullmq.enqueue([NewJob(id="more", name="work", payload=b"{}", priority=1)]),
        claim(bullmq),
        bullmq.counts(),
        bullmq.recover(10),
        bullmq.list(JobState.QUEUED),
        bullmq.cancel("waiting"),
        bullmq.sweep(10),
    ):
        try:
            await call
        except StorageError as error:
            named = f"{base}:{name} is a string" in str(error)
            assert named or "WRONGTYPE" in str(error)  # noqa: PT017 - not every verb reads every key
            refused += 1
    assert refused or name in ("meta", "marker", "paused", "stalled")
    await client.delete(f"{base}:{name}")
    if exists:
        await client.rename(f"{base}:aside", f"{base}:{name}")
    await enqueue(bullmq, job("after"))
    async with running(worker_on(bullmq, Recorder())):
        assert (await outcome(bullmq, "after")).kind is OutcomeKind.COMPLETED
