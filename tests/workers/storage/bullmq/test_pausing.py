"""A paused queue of BullMQ's: whatever comes meanwhile lies where the resume of any version takes it from."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, TypeAlias

import pytest

from tests.workers.storage.bullmq.steps import ERROR, LEASES
from workers.jobs import Completed, Failed, Released, Retried
from workers.storage.bullmq import BullMQStorage
from workers.testing.steps import claim_one, enqueue, job

Later: TypeAlias = Callable[[], Awaitable[object]]


async def _enqueue(storage: BullMQStorage, client: Any) -> Later:
    return lambda: storage.enqueue([job("a")])


async def _release(storage: BullMQStorage, client: Any) -> Later:
    await enqueue(storage, job("a"))
    held = await claim_one(storage)
    return lambda: storage.settle([Released(claim=held)])


async def _recover(storage: BullMQStorage, client: Any) -> Later:
    await enqueue(storage, job("a"))
    await claim_one(storage)
    await storage.recover(10)
    await client.delete(f"bull:{storage.queue}:a:lock")
    return lambda: storage.recover(10)


async def _retry(storage: BullMQStorage, client: Any) -> Later:
    await enqueue(storage, job("a"))
    await storage.settle([Failed(claim=await claim_one(storage), error=ERROR)])
    return lambda: storage.retry(["a"])


async def _promote(storage: BullMQStorage, client: Any) -> Later:
    await enqueue(storage, job("a", delay=timedelta(hours=1)))
    return lambda: storage.promote(["a"])


async def _become_due(storage: BullMQStorage, client: Any) -> Later:
    await enqueue(storage, job("a"))
    await storage.settle([Retried(claim=await claim_one(storage), delay=timedelta(0), error=ERROR)])
    return lambda: storage.claim("w", leases=LEASES, limit=1)


async def _complete_its_child(storage: BullMQStorage, client: Any) -> Later:
    key = f"bull:{storage.queue}"
    await enqueue(storage, job("a"))
    await client.delete(f"{key}:wait")
    await client.zadd(f"{key}:waiting-children", {"a": 1})
    await enqueue(storage, job("child"))
    parent = {"parentKey": f"{key}:a", "parent": json.dumps({"id": "a", "queueKey": key})}
    await client.hset(f"{key}:child", mapping=parent)
    await client.sadd(f"{key}:a:dependencies", f"{key}:child")
    held = await claim_one(storage)
    return lambda: storage.settle([Completed(claim=held, result=b"1")])


@pytest.mark.parametrize("prepare", [_enqueue, _release, _recover, _retry, _promote, _become_due, _complete_its_child])
async def test_what_comes_during_a_pause(
    storage: BullMQStorage, client: Any, prepare: Callable[[BullMQStorage, Any], Awaitable[Later]]
) -> None:
    """It waits in the list that BullMQ 5 puts in place of the other when it resumes."""
    later = await prepare(storage, client)
    key = f"bull:{storage.queue}"
    await client.hset(f"{key}:meta", "paused", 1)
    await client.lpush(f"{key}:paused", "before")
    await later()
    assert not await client.exists(f"{key}:wait")
    assert set(await client.lrange(f"{key}:paused", 0, -1)) == {"a", "before"}
