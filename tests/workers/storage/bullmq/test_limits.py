"""The limit of a whole queue; `tests/interop/test_bullmq_limits.py` has what Node makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.patience import PATIENCE_SECONDS
from tests.workers.storage.bullmq.steps import LEASES
from workers import Limit, Queue, QueueOptions, Tasks
from workers.errors import StorageError, Unsupported
from workers.jobs import Completed, NewJob
from workers.limits import HeldBack, LimitKey
from workers.storage.bullmq import BullMQStorage
from workers.storage.bullmq import waiting as bullmq_wait

HOUR = timedelta(hours=1)


async def enqueue(storage: BullMQStorage, count: int) -> list[str]:
    """So many jobs are there; their ids."""
    jobs = [NewJob(id=f"j{at}", name="n", payload=b"{}") for at in range(count)]
    return [result.id for result in await storage.enqueue(jobs)]


async def claimed(storage: BullMQStorage) -> int:
    """How many of the jobs that are left can be claimed."""
    return len(await storage.claim("w", leases=LEASES, limit=10))


async def meta(storage: BullMQStorage, client: Any) -> dict[str, str]:
    """What BullMQ reads."""
    found: dict[str, str] = await client.hgetall(f"bull:{storage.queue}:meta")
    return {name: found[name] for name in ("concurrency", "max", "duration") if name in found}


async def test_a_limit_holds(storage: BullMQStorage) -> None:
    """No more run at once, and no more start in the time; who waits is told why."""
    ids = await enqueue(storage, 5)
    await storage.declare_limits({"*": Limit("3/h", concurrency=2)})
    claims = await storage.claim("w", leases=LEASES, limit=10)
    assert len(claims) == 2
    assert await storage.held_back([ids[4], ids[0], "none"]) == [HeldBack("*", "", None), None, None]
    for claim in claims:
        await storage.settle([Completed(claim=claim, result=b"null")])
    assert await claimed(storage) == 1
    [held] = await storage.held_back([ids[4]])
    assert held is not None
    assert held.until is not None
    assert timedelta(minutes=59) < held.until - datetime.now(UTC) <= HOUR + timedelta(seconds=2)
    assert await claimed(storage) == 0
    await storage.declare_limits({"*": Limit()})
    assert await storage.held_back(ids) == [None] * 5
    assert await claimed(storage) == 2


async def test_a_limit_is_stored_in_bullmqs_words(storage: BullMQStorage, client: Any) -> None:
    """And read back in ours."""
    for limit, told in (
        (Limit("10/s", concurrency=50, version=1), {"concurrency": "50", "max": "10", "duration": "1000"}),
        (Limit("100/90s", version=1), {"max": "100", "duration": "90000"}),
        (Limit("7/3ms", burst=7, version=1), {"max": "7", "duration": "3"}),
        (Limit(concurrency=3, version=2), {"concurrency": "3"}),
    ):
        await storage.declare_limits({"*": limit})
        assert await meta(storage, client) == told
        [found] = (await storage.declared_limits()).values()
        assert (found.interval, found.capacity, found.concurrency) == (
            limit.interval,
            limit.capacity,
            limit.concurrency,
        )
        assert found.version == limit.version
    assert await storage.declared_limits() == {"*": Limit(concurrency=3, version=2)}


async def test_the_highest_version_counts(storage: BullMQStorage) -> None:
    """Of equal ones the last; it can be removed, and then any version counts."""
    await storage.declare_limits({"*": Limit("10/s", version=2)})
    await storage.declare_limits({"*": Limit("5/s", version=1)})
    assert await storage.declared_limits() == {"*": Limit("10/s", version=2)}
    await storage.declare_limits({"*": Limit("7/s", version=2)})
    assert await storage.declared_limits() == {"*": Limit("7/s", version=2)}
    assert not await storage.remove_limit("send")
    assert await storage.remove_limit("*")
    assert not await storage.remove_limit("*")
    assert await storage.declared_limits() == {}
    await storage.declare_limits({"*": Limit("1/s")})
    assert await storage.declared_limits() == {"*": Limit("1/s")}


async def test_what_another_program_limits_stays(storage: BullMQStorage, client: Any) -> None:
    """Unless a declaration says otherwise; it takes back only what it said before."""
    key = f"bull:{storage.queue}:meta"
    await client.hset(key, mapping={"max": 9, "duration": 1_000})
    await storage.declare_limits({"*": Limit(concurrency=2)})
    assert await storage.declared_limits() == {"*": Limit("9/s", concurrency=2)}
    await storage.declare_limits({"*": Limit("5/s")})
    assert await meta(storage, client) == {"max": "5", "duration": "1000"}
    await client.hset(key, "max", 6)
    await storage.declare_limits({"*": Limit(concurrency=2)})
    assert await meta(storage, client) == {"concurrency": "2", "max": "6", "duration": "1000"}


@pytest.mark.parametrize("junk", [{"max": "many", "duration": "5"}, {"max": "1.5", "duration": "7"}, {"max": "9" * 15}])
async def test_what_cannot_be_said_is_not(storage: BullMQStorage, client: Any, junk: Mapping[str, str]) -> None:
    """A rate of another program that ours have no words for."""
    await client.hset(f"bull:{storage.queue}:meta", mapping={"duration": "1", **junk})
    assert await storage.declared_limits() == {}


async def test_a_raised_limit_wakes_who_waits(storage: BullMQStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, although no job has ended."""
    monkeypatch.setattr(bullmq_wait, "BARRED_LOOK_SECONDS", 3_600.0)
    await enqueue(storage, 2)
    await storage.declare_limits({"*": Limit(concurrency=1)})
    assert await claimed(storage) == 1
    waiting = asyncio.create_task(storage.wait({"*"}, timeout=HOUR))
    await asyncio.wait([waiting], timeout=0.05)
    assert not waiting.done()
    await storage.declare_limits({"*": Limit(concurrency=2)})
    async with asyncio.timeout(PATIENCE_SECONDS):
        await waiting
    assert await claimed(storage) == 1


async def test_a_queue_declares_its_limit(redis_url: str, storage: BullMQStorage) -> None:
    """When it is first used."""
    queue = Queue(BullMQStorage(redis_url, storage.queue), options=QueueOptions(limits={"*": Limit(concurrency=1)}))
    await queue.enqueue(1)
    second = await queue.enqueue(2)
    assert await claimed(storage) == 1
    assert await queue.held_back(second.id) == HeldBack("*", "", None)
    assert await queue.manage.limits() == {"*": Limit(concurrency=1)}
    assert await queue.manage.remove_limit("*")
    assert await claimed(storage) == 1
    await queue.stop()


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"send": Limit("10/s")}, "limit 'send': BullMQ limits only a whole queue"),
        ({"*": Limit("10/s"), "partner": Limit(concurrency=1)}, "limit 'partner'"),
        ({"*": Limit("10/s", burst=1)}, "leave `burst` out"),
        ({"*": Limit("10/s", burst=20)}, "leave `burst` out"),
    ],
)
async def test_what_bullmq_cannot_limit_is_refused_where_it_is_declared(limits: dict[str, Limit], told: str) -> None:
    """Nothing is connected for that; nor is it stored by whoever asks the storage."""
    storage = BullMQStorage("redis://127.0.0.1:1", "q")
    with pytest.raises(Unsupported, match=told):
        Queue(storage, options=QueueOptions(limits=limits))
    with pytest.raises(Unsupported, match=told):
        await storage.declare_limits(limits)


async def test_keys_and_limits_of_tasks_are_refused(storage: BullMQStorage) -> None:
    """BullMQ has neither."""
    queue = Queue(storage)
    with pytest.raises(Unsupported, match="limit 'send'"):
        Tasks(queue).task("send", rate="10/s")(_handle)
    for options in ({"limit_key": LimitKey("*", "a")}, {"fair_key": "a"}):
        with pytest.raises(Unsupported, match="no ordering, limit or fair keys"):
            await queue.enqueue({}, **options)  # type: ignore[arg-type]  # as given


async def _handle(job: object) -> None: ...


@pytest.mark.parametrize("key", ["marker", "workers:limits"])
async def test_a_key_in_the_way_is_met_before_anything_changes(storage: BullMQStorage, client: Any, key: str) -> None:
    """And told."""
    await client.set(f"bull:{storage.queue}:{key}", "x")
    with pytest.raises(StorageError, match="is a string, not a"):
        await storage.declare_limits({"*": Limit(concurrency=2)})
    assert await meta(storage, client) == {}
