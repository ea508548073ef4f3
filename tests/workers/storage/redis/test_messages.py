"""What is published about queues on Redis, and who hears it."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

from redis.asyncio import Redis

from tests.servers import ValkeyProcess
from tests.workers.storage.redis.steps import enter, key
from workers.jobs import (
    JobEventKind,
)
from workers.storage.redis import RedisStorage
from workers.testing.steps import PATIENCE, claim_one, job, until


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
