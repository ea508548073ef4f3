"""The loading cache: one load per key at a time, nothing stale after a drop, bounded."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from federation.base.cache import LoadingCache

LONG = timedelta(hours=1)


class Source:
    """What the cache loads from: counts, waits while `open` is not set, raises `error` if there is one."""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.open = asyncio.Event()
        self.open.set()
        self.error: Exception | None = None
        self.version = 0

    async def __call__(self, key: str) -> str:
        self.loads.append(key)
        version = self.version
        await self.open.wait()
        if self.error is not None:
            raise self.error
        return f"{key}-{version}"


@pytest.fixture
def source() -> Source:
    return Source()


async def test_a_value_is_loaded_once_and_kept(source: Source) -> None:
    """Readers within the time to live get the first load's value."""
    cache = LoadingCache(source, ttl=LONG)
    assert [await cache.get("a"), await cache.get("a"), await cache.get("b")] == ["a-0", "a-0", "b-0"]
    assert source.loads == ["a", "b"]


async def test_a_value_past_its_time_is_loaded_again(source: Source) -> None:
    """With a time to live of nothing, each reader causes a load."""
    cache = LoadingCache(source, ttl=timedelta(0))
    await cache.get("a")
    source.version = 1
    assert await cache.get("a") == "a-1"


async def test_concurrent_readers_share_one_load(source: Source) -> None:
    """A burst costs one query; a reader that is cancelled does not fail the others."""
    cache = LoadingCache(source, ttl=LONG)
    source.open.clear()
    readers = [asyncio.create_task(cache.get("a")) for _ in range(20)]
    await asyncio.sleep(0)
    readers[0].cancel()
    await asyncio.wait(readers[:1])
    source.open.set()
    assert await asyncio.gather(*readers[1:]) == ["a-0"] * 19
    assert source.loads == ["a"]


async def test_a_drop_makes_the_next_reader_load_anew(source: Source) -> None:
    """The kept value is gone."""
    cache = LoadingCache(source, ttl=LONG)
    await cache.get("a")
    source.version = 1
    cache.drop("a")
    assert await cache.get("a") == "a-1"


async def test_a_drop_during_a_load_outdates_its_value(source: Source) -> None:
    """Who asked before gets the old value, who asks afterwards the new one, and the old one is never kept."""
    cache = LoadingCache(source, ttl=LONG)
    source.open.clear()
    early = asyncio.create_task(cache.get("a"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert source.loads == ["a"]
    source.version = 1
    cache.drop("a")
    late = asyncio.create_task(cache.get("a"))
    await asyncio.sleep(0)
    source.open.set()
    assert [*await asyncio.gather(early, late)] == ["a-0", "a-1"]
    assert await cache.get("a") == "a-1"
    assert source.loads == ["a", "a"]


async def test_a_load_that_fails_is_not_remembered(source: Source) -> None:
    """All who waited for it see the error; the next reader tries again."""
    cache = LoadingCache(source, ttl=LONG)
    source.error = ConnectionError("database")
    results = await asyncio.gather(*(cache.get("a") for _ in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [ConnectionError] * 3
    source.error = None
    assert await cache.get("a") == "a-0"
    assert source.loads == ["a", "a"]


async def test_the_least_recently_loaded_entries_make_room(source: Source) -> None:
    """At most so many values are kept, whoever names new servers."""
    cache = LoadingCache(source, ttl=LONG, max_entries=2)
    for key in "abc":
        await cache.get(key)
    await cache.get("c")
    await cache.get("b")
    await cache.get("a")
    assert source.loads == ["a", "b", "c", "a"]
