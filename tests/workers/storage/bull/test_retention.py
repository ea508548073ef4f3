"""How long records last beside Node, which knows no retention, and what it leaves of jobs."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta

import pytest

from tests.workers.storage.bull.steps import ERROR, SHORT, NodeBull, expired
from workers.jobs import DROP, Completed, Failed, JobState
from workers.storage.bull import BullStorage
from workers.testing.steps import HOUR, PATIENCE, claim_one, job, state, status, until


async def test_a_record_node_replaced_is_not_swept(storage: BullStorage, node: NodeBull) -> None:
    """Node removed a finished job and made another of its id: the old record's time is not the new one's."""
    await storage.enqueue([job("one", keep_completed=SHORT)])
    await storage.settle([Completed(claim=await claim_one(storage), result=b"1")])
    await node.client.delete(node.key("one"))
    await node.client.srem(node.key("completed"), "one")
    await node.add("one", opts=json.dumps({"jobId": "one"}))
    assert await node.take() == "one"
    await node.client.lrem(node.key("active"), 0, "one")
    await node.client.sadd(node.key("completed"), "one")
    await until(lambda: storage.sweep(10))
    assert await state(storage, "one") is JobState.COMPLETED
    assert await node.client.sismember(node.key("completed"), "one")


async def test_what_node_ends_expires_too(storage: BullStorage, node: NodeBull) -> None:
    """Node knows no retention: a job of ours that it ended lasts as long as it wants, one of its own for ever."""
    await storage.enqueue([job("ours", keep_completed=SHORT)])
    await node.add("theirs")
    for raw in ("ours", "theirs"):
        assert await node.take() == raw
        await node.client.lrem(node.key("active"), 0, raw)
        await node.client.sadd(node.key("completed"), raw)
    async with asyncio.timeout(PATIENCE):
        while await storage.status(["ours"]) != [None]:
            await storage.sweep(10)
    await storage.sweep(10)
    assert await node.client.smembers(node.key("completed")) == {"theirs"}
    assert await node.record("ours") == {}


@pytest.mark.parametrize("keep", ["null", "-1", '"1"', "1e400", "[]", "1e17"])
async def test_a_retention_that_is_none_is_for_ever(keep: str, storage: BullStorage, node: NodeBull) -> None:
    """Junk in a job's options never drops its record."""
    opts = f'{{"workers":{{"keepCompleted":{keep},"keepFailed":{keep}}}}}'
    done, lost = await node.add(opts=opts), await node.add(opts=opts)
    assert await storage.complete(done, b"1") is JobState.QUEUED
    await claim_one(storage, lease=SHORT)
    await expired(node, lost)
    assert (await storage.recover(10, max_stalls=0)).failed == (lost,)
    await storage.sweep(10)
    assert (await state(storage, done), await state(storage, lost)) == (JobState.COMPLETED, JobState.FAILED)


async def test_what_node_ran_again_does_not_expire_by_its_first_end(storage: BullStorage, node: NodeBull) -> None:
    """Failed here, retried and completed by Node: the record lasts from then on, however long ago the failure was."""
    await storage.enqueue([job("one", keep_failed=SHORT)])
    await storage.settle([Failed(claim=await claim_one(storage), error=ERROR)])
    await node.client.srem(node.key("failed"), "one")
    await node.client.lpush(node.key("wait"), "one")
    assert await node.take() == "one"
    await node.client.lrem(node.key("active"), 0, "one")
    await node.client.sadd(node.key("completed"), "one")
    await until(lambda: storage.sweep(10))
    found = await status(storage, "one")
    assert found.state is JobState.COMPLETED
    for _ in range(4):
        await storage.sweep(10)
    assert await node.client.zscore(node.key("workers:completed"), "one") > 0


async def test_worker_records_expire(storage: BullStorage, node: NodeBull) -> None:
    """Aged by an hour they are swept, cancelled jobs too, and nothing of them is left."""
    await storage.enqueue([job("one"), job("two", keep_completed=DROP)])
    assert await storage.cancel("one") == "cancelled"
    await storage.settle([Completed(claim=await claim_one(storage), result=b"1")])
    assert await storage.result("one") is not None
    for name in ("workers:cancelled", "workers:failed", "workers:seen"):
        for member, score in await node.client.zrange(node.key(name), 0, -1, withscores=True):
            expired = f"{score - HOUR / timedelta(milliseconds=1) - 1:.0f}"
            await node.client.zadd(node.key(name), {member: expired})
            if name == "workers:failed":
                await node.client.hset(node.key("one"), "workers:expires", expired)
    assert (await storage.result("one"), await storage.workers()) == (None, [])
    assert await storage.sweep(10) == 2
    assert [found async for found in node.client.scan_iter(node.key("*"))] == [node.key("id")]
