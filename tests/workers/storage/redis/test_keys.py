"""The keys of queues on Redis: what they are called, what they cost, when they go, and who shares them."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot

from tests.servers import ValkeyProcess
from tests.workers.storage.redis.steps import LEASES, SETS, THROTTLED, key, one_in_every_set
from workers import StorageError
from workers.jobs import (
    DROP,
    Completed,
)
from workers.storage.base import Storage
from workers.storage.redis import RedisStorage
from workers.testing.steps import HOUR, claim_one, job

BYTES_PER_JOB = 1_638  # 1.6 KiB


@pytest.mark.parametrize(
    ("prefix", "queue"),
    [("workers", "plain"), ("workers", "a}b"), ("", "{"), ("}", "}"), ("{x}", "x:y"), ("a:b", "100%"), ("é", "日本語")],
)
async def test_every_key_of_a_queue_is_in_one_slot(prefix: str, queue: str, own_server: ValkeyProcess) -> None:
    """Whatever prefix and queue are called, a cluster keeps all keys on one node, and there are no others."""
    storage: Storage = RedisStorage(own_server.url, queue, prefix=prefix)
    assert isinstance(storage, RedisStorage)
    await storage.connect()
    await one_in_every_set(storage)
    async with Redis.from_url(own_server.url) as client:
        keys = [found async for found in client.scan_iter()]
    assert len({key_slot(found) for found in keys}) == 1
    assert {found.rpartition(b":")[2].decode() for found in keys} == {*SETS, THROTTLED}
    await storage.disconnect()


async def test_prefixes_and_queues_that_look_alike_share_nothing(redis_url: str) -> None:
    """A colon in a queue's name is not the end of a prefix."""
    own = uuid.uuid4().hex
    left, right = RedisStorage(redis_url, "c", prefix=f"{own}:b"), RedisStorage(redis_url, "b:c", prefix=own)
    for storage in (left, right):
        await storage.connect()
    await left.enqueue([job("a")])
    assert await right.claim("w", leases=LEASES, limit=1) == []
    for storage in (left, right):
        await storage.disconnect()


async def test_a_queued_job_of_1_kib_takes_at_most_1_6_kib(own_server: ValkeyProcess) -> None:
    """Memory of the server per job, sets and all."""
    storage = RedisStorage(own_server.url)
    await storage.connect()
    async with Redis.from_url(own_server.url) as client:
        used = []
        for _ in range(9):
            await storage.enqueue([job(str(uuid.uuid4()), payload=b"x" * 1024) for _ in range(500)])
            used.append((await client.info("memory"))["used_memory"])
    assert (used[-1] - used[0]) / 4_000 <= BYTES_PER_JOB  # the first batch paid for scripts and connections
    await storage.disconnect()


async def test_worker_records_expire(storage: RedisStorage, client: Any) -> None:
    """An hour later, which their scores are made to say, a sweep leaves no key behind."""
    await storage.enqueue([job("cancelled"), job("done", keep_completed=DROP)])
    await storage.cancel("cancelled")
    await storage.settle([Completed(claim=await claim_one(storage), result=b"")])
    assert await storage.result("cancelled") is not None
    for name in ("cancelled", "workers"):
        for member, score in await client.zrange(key(storage, name), 0, -1, withscores=True):
            await client.zadd(key(storage, name), {member: score - HOUR / timedelta(microseconds=1) - 1})
    assert await storage.sweep(10) == 2
    assert await storage.result("cancelled") is None
    assert await storage.workers() == []
    assert [found async for found in client.scan_iter(key(storage, "*"))] == [key(storage, "meta").encode()]


@pytest.mark.parametrize("text", [True, False])
async def test_a_client_lends_its_settings(text: bool, redis_url: str, client: Any) -> None:
    """Bytes or text, binary payloads pass; the client stays open, and none of its connections is used."""
    async with Redis.from_url(redis_url, decode_responses=text) as lent:
        storage = RedisStorage(lent, f"test-{uuid.uuid4().hex}")
        await storage.connect()
        await storage.enqueue([job("a", payload=b"\xff\x00")])
        assert (await claim_one(storage)).payload == b"\xff\x00"
        await storage.disconnect()
        assert lent.connection_pool.get_connection_count()[0][0] == 0
        assert await lent.ping()


def test_a_url_names_the_queue_and_is_shown_nowhere() -> None:
    """The argument wins over the URL; a password is not in the repr, nor in the error about a wrong URL."""
    assert RedisStorage("redis://:secret@127.0.0.1/0?queue=mail").queue == "mail"
    assert RedisStorage("redis://127.0.0.1/0?queue=mail", "other").queue == "other"
    assert "secret" not in repr(RedisStorage("redis://:secret@127.0.0.1/0"))
    with pytest.raises(StorageError) as caught:
        RedisStorage("http://:secret@127.0.0.1")
    assert "secret" not in str(caught.value)


async def test_a_job_may_begin_as_a_later_link(storage: RedisStorage) -> None:
    """As when it is copied from another queue; which link it was outlives its payload."""
    await storage.enqueue([job("a", chain_index=1_000_000)])
    claim = await claim_one(storage)
    assert claim.chain_index == 1_000_000
    await storage.settle([Completed(claim=claim, result=b"1")])
    [status] = await storage.status(["a"])
    assert status is not None
    assert status.chain_index == 1_000_000
