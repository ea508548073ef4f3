"""Leases that were given before a clock was set back, on every storage that keeps their time itself."""

from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import timedelta

import psycopg
import pytest
from redis.asyncio import Redis

from workers import Queue, QueueOptions
from workers.checks import LONGEST_LEASE
from workers.jobs import HEARD_EVERY, SILENT_AFTER, Recovery
from workers.storage.base import Storage
from workers.storage.memory import MemoryStorage
from workers.storage.redis import RedisStorage
from workers.storage.sql import SqlStorage
from workers.testing import Harness
from workers.testing.steps import apply, claim, completed, enqueue, job
from workers.worker.handlers import Handler

CLAIMED_AHEAD = LONGEST_LEASE + timedelta(days=1)


@pytest.mark.parametrize("harness", ["memory", "file", "sqlite"], indirect=True)
async def test_a_lease_that_ends_later_than_any_may_ends_soon(harness: Harness) -> None:
    """Its worker may be dead, and the time at which it ends decades away; one that lives renews it by then."""
    storage = await harness.open()
    await enqueue(storage, job("dead"), job("live"))
    await claim(storage, 1, lease=CLAIMED_AHEAD)
    live = await claim(storage, 1, lease=CLAIMED_AHEAD)
    assert (await storage.recover(100)).requeued == ()
    await harness.advance(HEARD_EVERY)
    assert (await storage.renew([replace(each, lease=LONGEST_LEASE) for each in live])).lost == {}
    await harness.advance(SILENT_AFTER - HEARD_EVERY)
    assert (await storage.recover(100)).requeued == ("dead",)
    await apply(storage, *map(completed, live))


async def test_postgresql_shortens_it(postgres_url: str) -> None:
    """Whose clock no test can move: to what a worker that lives never leaves to run out. The longest one stays."""
    await SqlStorage(postgres_url).migrate()
    storage = SqlStorage(postgres_url)
    await storage.connect()
    await _recovered_of_none(storage)
    with psycopg.connect(postgres_url.replace("+psycopg", "")) as connection:
        found = connection.execute("SELECT lease_until FROM workers_jobs ORDER BY seq").fetchall()
    await storage.disconnect()
    _are_soon_and_late(*(timedelta(milliseconds=until) for (until,) in found))


async def test_redis_shortens_it(redis_url: str, client: Redis) -> None:
    """As PostgreSQL does."""
    name = f"test-{uuid.uuid4().hex}"
    storage = RedisStorage(redis_url, name)
    await storage.connect()
    await _recovered_of_none(storage)
    (key,) = [key async for key in client.scan_iter(f"*{name}*:leases")]
    ends = dict(await client.zrange(key, 0, -1, withscores=True))
    await storage.disconnect()
    _are_soon_and_late(*(timedelta(microseconds=ends[job]) for job in ("ahead", "longest")))


async def _recovered_of_none(storage: Storage) -> None:
    await enqueue(storage, job("ahead"))
    await claim(storage, 1, lease=CLAIMED_AHEAD)
    await enqueue(storage, job("longest"))
    await claim(storage, 1, lease=LONGEST_LEASE)
    assert await storage.recover(100) == Recovery()


def _are_soon_and_late(ahead: timedelta, longest: timedelta) -> None:
    assert abs(longest - ahead - (LONGEST_LEASE - SILENT_AFTER)) < timedelta(minutes=2)


def test_no_handler_and_no_queue_has_a_longer_one() -> None:
    """It would be taken for one by a clock that was ahead."""
    with pytest.raises(ValueError, match="a handler's lease must be at most 1 day"):
        Handler(print, lease=LONGEST_LEASE + timedelta(seconds=1))
    with pytest.raises(ValueError, match="lease must be at most 1 day"):
        Queue(MemoryStorage(), options=QueueOptions(lease=LONGEST_LEASE + timedelta(seconds=1)))
