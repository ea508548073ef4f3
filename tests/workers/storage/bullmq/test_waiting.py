"""How the BullMQ storage waits for work: woken by one marker, which no waiter keeps to itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, TypeAlias

import pytest
import redis
from redis.asyncio import Redis

from tests.servers import ValkeyProcess
from tests.workers.storage.bullmq.steps import ERROR, LEASES, all_blocked
from workers.jobs import Cancelled, Claim, Completed, Continued, Failed, Released, Retried
from workers.storage.bullmq import BullMQStorage
from workers.storage.bullmq import waiting as bullmq_wait
from workers.testing.steps import PATIENCE, claim_one, job, next_claim, until


@pytest.fixture(autouse=True)
def no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiters look at the queue before they block and not again, so that only a wake-up ends a wait."""
    monkeypatch.setattr(bullmq_wait, "LOOK_SECONDS", 3_600.0)
    monkeypatch.setattr(bullmq_wait, "BARRED_LOOK_SECONDS", 3_600.0)


async def test_a_cancelled_wait_hands_on_what_it_popped(storage: BullMQStorage, client: Any, redis_url: str) -> None:
    """A waiter cancelled while its wake-up is on the way wakes the next waiter instead."""
    waits = [asyncio.create_task(storage.wait(("*",), timeout=timedelta(seconds=60))) for _ in range(2)]
    await until(lambda: all_blocked(client, 2))
    with redis.Redis.from_url(redis_url) as now:  # blocks this loop: nobody here has read the answer yet
        now.zadd(f"bull:{storage.queue}:marker", {"0": 0})
        assert not now.exists(f"bull:{storage.queue}:marker")
    woken = [wait for wait in waits if not wait.cancel()]
    assert woken == []
    await asyncio.gather(*waits, return_exceptions=True)
    assert await client.exists(f"bull:{storage.queue}:marker")


async def test_cancelling_at_any_moment_wakes_the_next(storage: BullMQStorage) -> None:
    """Whenever a waiter is cancelled, a job that arrived wakes another at once."""
    for round_number in range(40):
        first = asyncio.create_task(storage.wait(("*",), timeout=timedelta(seconds=60)))
        await asyncio.sleep(0.0003 * (round_number % 10))
        added = asyncio.create_task(storage.enqueue([job(f"job-{round_number}")]))
        await asyncio.sleep(0.0002 * (round_number % 7))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await added
        async with asyncio.timeout(PATIENCE):
            await storage.wait(("*",), timeout=timedelta(seconds=60))
        await storage.settle([Completed(claim=await claim_one(storage), result=b"1")])


async def test_a_waiter_that_leaves_hands_on_the_due_time(storage: BullMQStorage, client: Any) -> None:
    """The one waiter that popped the mark of a delayed job puts it back when it stops waiting."""
    first = asyncio.create_task(storage.wait(("*",), timeout=timedelta(seconds=60)))
    await until(lambda: all_blocked(client, 1))
    second = asyncio.create_task(storage.wait(("*",), timeout=timedelta(seconds=60)))
    await until(lambda: all_blocked(client, 2))
    await storage.enqueue([job("soon", delay=timedelta(seconds=2))])
    await until(lambda: all_blocked(client, 2))  # the first again, with the mark in its hand
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    async with asyncio.timeout(PATIENCE):
        await second
    assert (await claim_one(storage)).job_id == "soon"


async def test_a_lost_marker_does_not_hide_a_job(storage: BullMQStorage, client: Any) -> None:
    """A waiter that was killed with the marker in its hand costs nobody a job: the next one looks for itself."""
    await storage.enqueue([job("a")])
    await client.delete(f"bull:{storage.queue}:marker")
    async with asyncio.timeout(PATIENCE):
        await storage.wait(("*",), timeout=timedelta(seconds=60))


@pytest.mark.parametrize(
    "meta",
    [{"paused": "1"}, {"concurrency": "0"}, {"max": "1", "duration": "60000"}],
    ids=lambda meta: next(iter(meta)),
)
async def test_a_wait_for_what_may_not_run_does_not_spin(
    storage: BullMQStorage, client: Any, meta: dict[str, str]
) -> None:
    """Jobs behind a pause, a concurrency limit or a rate limit set in Node are no reason to wake."""
    key = f"bull:{storage.queue}"
    await storage.enqueue([job("a"), job("b")])
    await client.hset(f"{key}:meta", mapping=meta)
    await client.set(f"{key}:limiter", 1, px=60_000)
    await client.delete(f"{key}:marker")
    assert await storage.claim("w", leases=LEASES, limit=1) == []
    started = asyncio.get_running_loop().time()
    await storage.wait(("*",), timeout=timedelta(milliseconds=200))
    assert asyncio.get_running_loop().time() - started >= 0.2


Free: TypeAlias = Callable[[BullMQStorage, Claim], Awaitable[object]]

HOUR = timedelta(hours=1)
WAYS_TO_FREE: dict[str, Free] = {
    "completed": lambda storage, held: storage.settle([Completed(claim=held, result=b"1")]),
    "failed": lambda storage, held: storage.settle([Failed(claim=held, error=ERROR)]),
    "cancelled": lambda storage, held: storage.settle([Cancelled(claim=held)]),
    "retried": lambda storage, held: storage.settle([Retried(claim=held, delay=HOUR, error=ERROR)]),
    "continued": lambda storage, held: storage.settle(
        [Continued(claim=held, then=job(held.job_id, chain_index=1, delay=HOUR))]
    ),
    "released": lambda storage, held: storage.settle([Released(claim=held)]),
    "removed": lambda storage, held: storage.remove([held.job_id], running=True),
    "completed from outside": lambda storage, held: storage.complete(held.job_id, b"1"),
}


@pytest.mark.parametrize("free", WAYS_TO_FREE.values(), ids=WAYS_TO_FREE)
async def test_a_freed_slot_of_the_queue_wakes(storage: BullMQStorage, client: Any, free: Free) -> None:
    """With as many running as the queue allows, whatever ends one of them lets the next begin, here or in Node."""
    key = f"bull:{storage.queue}"
    await client.hset(f"{key}:meta", "concurrency", "1")
    await storage.enqueue([job("a"), job("b")])
    held = await claim_one(storage)
    waiting = asyncio.create_task(storage.wait(("*",), timeout=HOUR))
    await until(lambda: _waits_without_a_marker(storage, client))
    assert await storage.claim("w", leases=LEASES, limit=2) == []
    await free(storage, held)
    async with asyncio.timeout(PATIENCE):
        await waiting
    [following] = await storage.claim("w", leases=LEASES, limit=2)
    await client.delete(f"{key}:marker")
    await storage.enqueue([job("c")])
    await free(storage, following)
    assert await client.zscore(f"{key}:marker", "0") == 0


async def _waits_without_a_marker(storage: BullMQStorage, client: Any) -> bool:
    """The mark that the last claim left is gone, and has not ended the wait."""
    return await all_blocked(client, 1) and not await client.exists(f"bull:{storage.queue}:marker")


async def test_a_wait_ends_with_the_rate_limit(storage: BullMQStorage, client: Any) -> None:
    """When the time of a limit set in Node is over, nobody has to wake those who wait."""
    await client.hset(f"bull:{storage.queue}:meta", mapping={"max": "1", "duration": "300"})
    await storage.enqueue([job("a"), job("b")])
    await storage.settle([Completed(claim=await claim_one(storage), result=b"1")])
    assert (await next_claim(storage)).job_id == "b"


async def test_marks_that_come_to_nothing_are_not_chased(own_server: ValkeyProcess) -> None:
    """While others fill the queue's slots, and leave a mark with each job, a worker looks less and less often."""
    storage = BullMQStorage(own_server.url)
    await storage.connect()
    async with Redis.from_url(own_server.url, decode_responses=True) as client:
        await client.hset("bull:default:meta", "concurrency", "0")
        waiting = asyncio.create_task(storage.wait(("*",), timeout=timedelta(seconds=60)))
        started = asyncio.get_running_loop().time()
        for _ in range(200):
            await client.zadd("bull:default:marker", {"0": 0})
            await asyncio.sleep(0.005)
        looks = (await client.info("commandstats"))["cmdstat_hmget"]["calls"]
        seconds = asyncio.get_running_loop().time() - started
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await storage.disconnect()
    assert 2 <= looks <= 12 + seconds


async def test_an_idle_wait_asks_next_to_nothing(own_server: ValkeyProcess) -> None:
    """While nothing happens, a waiting worker sends no command."""
    storage = BullMQStorage(own_server.url)
    await storage.connect()
    waiting = asyncio.create_task(storage.wait(("*",), timeout=timedelta(seconds=60)))
    async with Redis.from_url(own_server.url, decode_responses=True) as client:
        await until(lambda: all_blocked(client, 1))
        before = (await client.info("stats"))["total_commands_processed"]
        await asyncio.sleep(0.5)
        assert (await client.info("stats"))["total_commands_processed"] - before == 1, "the first INFO itself"
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await storage.disconnect()
