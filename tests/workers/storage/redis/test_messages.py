"""What is published about queues on Redis, and who hears it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

from redis.asyncio import Redis

from tests.servers import ValkeyProcess
from tests.workers.storage.redis.steps import LEASES, enter, key
from workers.jobs import (
    JobEventKind,
)
from workers.storage.on_redis.messages import unpack
from workers.storage.redis import RedisStorage
from workers.testing.steps import PATIENCE, claim_one, completed, job, until


async def test_an_idle_wait_asks_the_server_once(own_server: ValkeyProcess) -> None:
    """While it sleeps, nothing is asked."""
    storage = RedisStorage(own_server.url)
    await storage.connect()
    await storage.wait(["*"], timeout=timedelta(milliseconds=1))
    async with Redis.from_url(own_server.url) as client:
        await client.config_resetstat()
        await storage.wait(["*"], timeout=timedelta(milliseconds=500))
        statistics = await client.info("commandstats")
    assert statistics["cmdstat_evalsha"]["calls"] == 2  # before the sleep, and at its end
    await storage.disconnect()


async def test_events_nobody_wants_are_no_longer_sent(storage: RedisStorage, client: Any) -> None:
    """After the last subscriber has left, the server is told so, and a new one hears again."""
    await enter(storage)
    channel = key(storage, "events@0")
    assert (await client.pubsub_numsub(channel))[0][1] == 1
    await storage.enqueue([job("a")])

    async def is_unheard() -> bool:
        [(_, hearers)] = await client.pubsub_numsub(channel)
        return not hearers

    await until(is_unheard)
    async with storage.subscribe("b") as events, asyncio.timeout(PATIENCE):
        await storage.enqueue([job("b")])
        assert (await events.get()).kind is JobEventKind.QUEUED


async def test_who_listens_for_cancel_requests_hears_no_other_events(storage: RedisStorage, client: Any) -> None:
    """The requests have a channel of their own, so that a busy queue's events are not sent to its workers."""
    await storage.enqueue([job("a")])
    await claim_one(storage)
    async with storage.cancel_requests() as requests, asyncio.timeout(PATIENCE):
        assert (await client.pubsub_numsub(key(storage, "events@0")))[0][1] == 0
        await storage.cancel("a")
        assert (await requests.get()).job_id == "a"


async def test_databases_of_one_server_hear_nothing_of_each_other(redis_url: str, storage: RedisStorage) -> None:
    """Pub/sub knows no databases, our channels do."""
    other = RedisStorage(redis_url.removesuffix("/0") + "/1", storage.queue)
    await other.connect()
    async with storage.events() as events, asyncio.timeout(PATIENCE):
        await other.enqueue([job("other")])
        await storage.enqueue([job("mine")])
        assert (await events.get()).job_id == "mine"
    await other.disconnect()


async def test_a_block_of_many_enqueues_publishes_one_wake_up(storage: RedisStorage, client: Any) -> None:
    """For all the names in it, at its end, however many waited; a block without jobs publishes none."""
    names = ("a", "b", "c")
    waits = [asyncio.create_task(storage.wait([name], timeout=timedelta(minutes=1))) for name in names]
    sleepers = key(storage, "sleepers")

    async def all_sleep() -> bool:
        return bool(await client.hlen(sleepers) == len(names))

    await until(all_sleep)
    async with client.pubsub() as heard, asyncio.timeout(PATIENCE):
        await heard.subscribe(key(storage, "wake@0"))
        async with storage.with_notify():
            pass
        async with storage.with_notify():
            for at in range(9):
                await storage.enqueue([job(f"job-{at}", name=names[at % 3])])
            assert await client.hlen(sleepers) == len(names)
        await asyncio.gather(*waits)
        await client.publish(key(storage, "wake@0"), b"the end")
        told = [message["data"] async for message in _until(heard, b"the end")]
    assert sorted(unpack(told[0])) == [b"a", b"b", b"c"]
    assert len(told) == 1


async def _until(heard: Any, last: bytes) -> AsyncIterator[Any]:
    async for message in heard.listen():
        if message.get("data") == last:
            return
        if message["type"] == "message":
            yield message


async def test_only_results_that_are_soon_gone_are_published(storage: RedisStorage, client: Any) -> None:
    """As events of a kind of their own; of those that are kept nothing travels."""
    await storage.enqueue([job("short", keep=timedelta(seconds=1)), job("long")])
    short, long = await storage.claim("w", leases=LEASES, limit=2)
    async with client.pubsub() as heard, asyncio.timeout(PATIENCE):
        await heard.subscribe(key(storage, "events@0"))
        await storage.settle([completed(short, b"1"), completed(long, b"2")])
        await client.publish(key(storage, "events@0"), b"the end")
        [told] = [message["data"] async for message in _until(heard, b"the end")]
    assert unpack(told) == [9, b"1", 3, b"short", 3, b"long"]
