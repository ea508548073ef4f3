"""How the BullMQ storage waits for work: woken by one marker, which no waiter keeps to itself."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
import redis
from redis.asyncio import Redis

from tests.servers import ValkeyProcess
from tests.workers.storage.bullmq.steps import LEASES, all_blocked
from workers.jobs import Completed
from workers.storage.bullmq import BullMQStorage
from workers.storage.bullmq import wait as bullmq_wait
from workers.testing.steps import PATIENCE, claim_one, job, until


@pytest.fixture(autouse=True)
def no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiters look at the queue before they block and not again, so that only a wake-up ends a wait."""
    monkeypatch.setattr(bullmq_wait, "LOOK_SECONDS", 3_600.0)


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
