"""What Node and others may write into a queue is set aside and told once, or named and mended when asked."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.workers.running import AT_ONCE, Recorder, done, outcome, running
from tests.workers.storage.bull.steps import NodeBull, claimed
from workers import StorageError, WorkerOptions
from workers.errors import StorageDamaged
from workers.jobs import OutcomeKind, RepairOutcome
from workers.storage.bull import BullStorage
from workers.storage.bull.codec import RESERVED_IDS
from workers.testing.steps import claim_one, completed, enqueue, job
from workers.worker import Worker
from workers.worker.events import WorkerEventKind as Kind


@pytest.mark.parametrize("name", ["wait", "active", "delayed", "completed", "failed", "workers:seen"])
async def test_a_job_named_as_a_key_is_set_aside(name: str, storage: BullStorage, node: NodeBull) -> None:
    """The worker goes on, and the repair gives the job an id that is no key's."""
    record = {"data": '{"from":"node"}', "opts": '{"attempts":4}', "timestamp": "1", "attempts": "4"}
    for field, value in record.items():
        await node.client.hset(node.key(name), field, value)
    recorder = Recorder()
    worker = Worker(
        storage,
        {"work": done},
        lease=timedelta(milliseconds=300),
        observers=[recorder],
        options=WorkerOptions(retry=AT_ONCE),
    )
    async with running(worker):
        assert (await recorder.seen(Kind.SET_ASIDE)).job_ids == (name,)
        await enqueue(storage, job("ours"))
        assert (await outcome(storage, "ours")).kind is OutcomeKind.COMPLETED
    assert len(recorder.of(Kind.SET_ASIDE)) == 1
    [repaired] = await storage.repair()
    assert (repaired.id, repaired.outcome) == (name, RepairOutcome.REQUEUED)
    again = await claim_one(storage)
    assert (again.payload, again.max_attempts, again.attempt) == (b'{"from":"node"}', 4, 1)
    assert again.job_id == name or repr(again.job_id) in repaired.reason
    assert again.job_id not in RESERVED_IDS
    assert await storage.quarantine() == []


@pytest.mark.parametrize("name", ["wait", "completed", "id", "workers:quarantine"])
async def test_a_key_in_the_way_is_named_until_it_is_repaired(name: str, storage: BullStorage, node: NodeBull) -> None:
    """An end waits for that, too; the counter of Node's ids begins where nobody has been."""
    await enqueue(storage, job("held"))
    held = await claim_one(storage)
    await node.client.delete(node.key(name))
    await node.client.xadd(node.key(name), {"their": "own"})
    with pytest.raises(StorageDamaged, match=f"{node.key(name)} is a "):
        await storage.claim("w", leases={"*": timedelta(seconds=1)}, limit=1)
    assert [(one.id, one.outcome) for one in await storage.repair()] == [(name, RepairOutcome.MOVED)]
    assert [one.id for one in await storage.quarantine()] == [name]
    await enqueue(storage, job("after"))
    assert await claimed(storage) == ["after"]
    assert [one.status.value for one in await storage.settle([completed(held)])] == ["applied"]
    if name == "id":
        assert await node.client.incr(node.key("id")) > 1_700_000_000_000


async def test_nobody_repairs_a_queue_of_bull_3(storage: BullStorage, node: NodeBull) -> None:
    """Whatever else is wrong there: it is somebody else's, and works."""
    await node.client.zadd(node.key("completed"), {"1": 1})
    await node.client.set(node.key("wait"), "x")
    with pytest.raises(StorageError, match="Bull 3 or newer"):
        await storage.repair()
    assert await node.client.zcard(node.key("completed")) == 1
    assert await node.client.get(node.key("wait")) == "x"


async def test_a_job_named_as_a_lock_leaves_the_lock_alone(storage: BullStorage, node: NodeBull) -> None:
    """Whoever holds the job of that lock goes on holding it."""
    await enqueue(storage, job("ours"))
    held = await claim_one(storage)
    await node.client.lpush(node.key("wait"), "ours:lock")
    assert await claimed(storage) == []
    assert [one.id for one in storage.news()] == ["ours:lock"]
    assert await node.client.get(node.key("ours:lock")) == held.token
