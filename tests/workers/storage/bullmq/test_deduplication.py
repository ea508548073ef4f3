"""Deduplication beside BullMQ, and why the storage does not leave our keys to BullMQ's own."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any, TypeAlias

import pytest
from bullmq import Queue as StockQueue

from tests.workers.running import outcome
from tests.workers.storage.bullmq.steps import LEASES
from workers import DeduplicationMode, EnqueueStatus, Job, JobState, Queue, Tasks, Unsupported
from workers.jobs import CancelResult
from workers.kv.redis import RedisKvStore
from workers.storage.bullmq import BullMQStorage
from workers.testing.steps import claim_one

HOUR = timedelta(hours=1)
HOUR_MS = 3_600_000

Producer: TypeAlias = Any  # bullmq's producer, which has no types


@pytest.fixture
async def marks(redis_url: str) -> AsyncIterator[RedisKvStore]:
    async with RedisKvStore(redis_url, prefix=f"kv-{uuid.uuid4().hex}") as store:
        yield store


@pytest.fixture
async def producer(redis_url: str, storage: BullMQStorage) -> AsyncIterator[Producer]:
    """BullMQ's own, on the queue of `storage`."""
    queue = StockQueue(storage.queue, {"connection": redis_url})
    yield queue
    await queue.close()


async def test_tasks_are_deduplicated_by_marks(storage: BullMQStorage, marks: RedisKvStore) -> None:
    """Of 50 enqueues at once with one key one is queued and runs; the others, then and afterwards, are told its id."""
    queue = Queue(storage)
    tasks = Tasks(queue, marks, deduplication_fallback="closed")
    runs: list[object] = []

    @tasks.task("digest")
    async def digest(job: Job) -> None:
        runs.append(job.payload)

    queue.execute(tasks.handlers())
    async with queue:
        found = await asyncio.gather(*(tasks.enqueue_task(digest, at, deduplication_key="bob") for at in range(50)))
        [queued] = [one for one in found if one.status is EnqueueStatus.QUEUED]
        assert {one.id for one in found} == {queued.id}
        await outcome(storage, queued.id)
        late = await tasks.enqueue_task_many(digest, [50, 51], deduplication_key="bob")
        assert (late.status, late.ids) == (EnqueueStatus.DUPLICATE, (queued.id,))
        assert sum((await queue.counts()).values()) == 1
    assert len(runs) == 1


async def test_what_marks_cannot_keep_is_refused(storage: BullMQStorage, marks: RedisKvStore) -> None:
    """Other modes, and keys of jobs themselves; nothing is written."""
    queue = Queue(storage)
    tasks = Tasks(queue, marks)

    @tasks.task("digest")
    async def digest(job: Job) -> None: ...

    async with queue:
        for mode in (DeduplicationMode.SIMPLE, DeduplicationMode.DEBOUNCE):
            with pytest.raises(Unsupported, match=mode.value):
                await tasks.enqueue_task(digest, 1, deduplication_key="bob", deduplication_mode=mode)
        with pytest.raises(Unsupported, match="natively"):
            tasks.spec(digest, 1, deduplication_key="bob")
        assert sum((await queue.counts()).values()) == 0
    assert await marks.get(("_federation", "task_deduplication", "digest", "bob")) is None


async def test_bullmqs_throttle_ends_with_its_job(storage: BullMQStorage, producer: Producer) -> None:
    """There a key with a time is free as soon as its job is cancelled; ours is taken whatever becomes of it."""
    throttle = {"id": "key", "ttl": HOUR_MS}
    await producer.add("work", 1, {"jobId": "first", "deduplication": throttle})
    assert (await producer.add("work", 2, {"jobId": "second", "deduplication": throttle})).id == "first"
    assert await storage.cancel("first") is CancelResult.CANCELLED
    assert (await producer.add("work", 3, {"jobId": "third", "deduplication": throttle})).id == "third"


async def test_bullmqs_debounce_replaces_the_job(storage: BullMQStorage, producer: Producer) -> None:
    """There the job that waited is gone with its id, and what comes once it is due is lost; ours has the last one."""
    debounce = {"id": "key", "ttl": HOUR_MS, "extend": True, "replace": True}
    await producer.add("work", 1, {"jobId": "first", "delay": HOUR_MS, "deduplication": debounce})
    await producer.add("work", 2, {"jobId": "second", "delay": HOUR_MS, "deduplication": debounce})
    assert await storage.status(["first"]) == [None]
    await storage.promote(["second"])
    last = await producer.add("work", 3, {"jobId": "third", "delay": HOUR_MS, "deduplication": debounce})
    assert last.id == "second"
    assert (await claim_one(storage)).payload == b"2"
    assert await storage.claim("w", leases=LEASES, limit=1) == []
    lost = await producer.add("work", 4, {"jobId": "fourth", "delay": HOUR_MS, "deduplication": debounce})
    assert lost.id == "second"
    assert (await storage.counts())[JobState.SCHEDULED] == 0
