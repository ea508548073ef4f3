"""Sliding windows, in memory and in Redis: the same decisions, bounded memory, and no Redis is no outage."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from federation.node.limits import MAX_REMEMBERED, MAX_WINDOWS, Limit, MemoryWindows, RedisWindows, Windows
from tests.servers import valkey

THREE = Limit(requests=3, window=timedelta(seconds=60))
START = 1_800_000_000.0


class Clock:
    """Shows what it is set to."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client: Redis = Redis.from_url(redis_url, decode_responses=True)
    yield client
    await client.aclose()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "redis"])
def windows(request: pytest.FixtureRequest, clock: Clock) -> Windows:
    if request.param == "memory":
        return MemoryWindows(clock)
    return RedisWindows(request.getfixturevalue("redis"), clock)


@pytest.fixture
async def subject(redis: Redis) -> AsyncIterator[str]:
    """A name of this test's own."""
    name = f"proxy:https://{uuid.uuid4().hex}.example"
    yield name
    await redis.delete(*[key async for key in redis.scan_iter(f"rl:{name}*")], f"rl:{name}")


async def ask(windows: Windows, subject: str, times: int) -> list[bool]:
    return [await windows.allows(subject, THREE) for _ in range(times)]


async def test_requests_beyond_the_limit_are_refused(windows: Windows, subject: str) -> None:
    """And only they, and only of that subject."""
    assert await ask(windows, subject, 5) == [True, True, True, False, False]
    assert await ask(windows, f"{subject}/other", 1) == [True]


async def test_a_window_slides(windows: Windows, subject: str, clock: Clock) -> None:
    """Each request is forgotten a window later, on its own."""
    for _ in range(3):
        await windows.allows(subject, THREE)
        clock.now += 20

    clock.now += 0.5  # the first one is 60.5 s old, the others are not
    assert await ask(windows, subject, 2) == [True, False]


async def test_hammering_prolongs_the_block(windows: Windows, subject: str, clock: Clock) -> None:
    """Refused requests count, too; silence for a window ends it."""
    await ask(windows, subject, 4)
    clock.now += 50
    assert await ask(windows, subject, 3) == [False] * 3
    clock.now += 20
    assert await ask(windows, subject, 1) == [False]
    clock.now += 61
    assert await ask(windows, subject, 1) == [True]


async def test_the_key_in_redis_is_what_others_write(redis: Redis, subject: str, clock: Clock) -> None:
    """A sorted set of times in milliseconds under `rl:`, gone a second after its window; bounded by its limit."""
    windows = RedisWindows(redis, clock)
    await ask(windows, subject, 20)

    members = await redis.zrange(f"rl:{subject}", 0, -1, withscores=True)
    assert len(members) == THREE.requests + 1
    for member, score in members:
        assert score == START * 1000
        assert member.partition("-")[0] == str(int(score))
    assert 59_000 < await redis.pttl(f"rl:{subject}") <= 61_000


async def test_processes_share_a_window(redis: Redis, subject: str, clock: Clock) -> None:
    """Two nodes on one Redis count together."""
    first, second = RedisWindows(redis, clock), RedisWindows(redis, clock)

    assert await ask(first, subject, 2) + await ask(second, subject, 2) == [True, True, True, False]


@pytest.mark.parametrize("windows", ["memory", "redis"], indirect=True)
async def test_a_large_limit_is_counted_and_slides(windows: Windows, subject: str, clock: Clock) -> None:
    """Of the stretch before as much counts as the window still covers; two later nothing is left of it."""
    limit = Limit(requests=MAX_REMEMBERED + 1, window=timedelta(seconds=60))
    answers = [await windows.allows(subject, limit) for _ in range(limit.requests + 1)]
    clock.now += 90  # half of the next stretch is over
    half = [await windows.allows(subject, limit) for _ in range(limit.requests // 2 + 1)]
    clock.now += 120
    assert [answers.count(False), answers[-1]] == [1, False]
    assert [half.count(False), half[-1]] == [1, False]
    assert await windows.allows(subject, limit)


async def test_memory_is_bounded(clock: Clock) -> None:
    """Whoever asked least recently is forgotten first."""
    windows = MemoryWindows(clock)
    await ask(windows, "first", 4)
    await ask(windows, "second", 4)
    for number in range(MAX_WINDOWS - 1):
        await windows.allows(str(number), THREE)

    assert await ask(windows, "second", 1) == [False]
    assert await ask(windows, "first", 1) == [True]


async def test_without_its_redis_a_process_counts_for_itself() -> None:
    """An outage neither stops requests nor lifts the limit, and is logged once, not per request."""
    with valkey() as server:
        redis: Redis = Redis.from_url(server.url, decode_responses=True)
        windows = RedisWindows(redis)
        assert await ask(windows, "subject", 1) == [True]
        server.stop()
        with capture_logs() as logs:
            answers = await ask(windows, "subject", 5)
        await redis.aclose()

    assert answers == [True, True, True, False, False]
    assert [event["event"] for event in logs] == ["rate_limits_not_shared"]
