"""Many jobs of a BullMQ queue are changed at once: together where nobody is at them, else one by one."""

from __future__ import annotations

import asyncio
import uuid
from datetime import timedelta
from typing import Any

import pytest
import redis

from tests.servers import ValkeyProcess
from tests.workers.storage.bullmq.steps import ERROR, LEASES
from workers import JobState
from workers.jobs import Failed
from workers.storage.bullmq import BullMQStorage
from workers.storage.bullmq import jobs as bullmq_jobs
from workers.storage.bullmq.server import BullMQServer, Contended
from workers.testing.steps import job

PATIENCE = timedelta(seconds=5)
IDS = [f"job-{number}" for number in range(250)]


@pytest.fixture(params=["together", "one by one"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How jobs are changed; without a round for all of them nothing else is left."""
    if request.param == "one by one":
        monkeypatch.setattr(bullmq_jobs, "ROUNDS_TOGETHER", 0)
    return str(request.param)


@pytest.mark.usefixtures("way")
async def test_a_bulk_counts_what_it_changed(storage: BullMQStorage, client: Any) -> None:
    """Waiting, failed and named twice: each once; running, scheduled by Node and unknown ones: not at all."""
    await storage.enqueue([job(each) for each in IDS])
    running, *failing = await storage.claim("w", leases=LEASES, limit=4)
    await storage.settle([Failed(claim=claim, error=ERROR) for claim in failing])
    await client.hset(f"bull:{storage.queue}:{IDS[10]}", "rjk", "every-hour")

    assert await storage.retry([*IDS, *IDS[:5], "nobody"]) == 3
    assert (await storage.counts())[JobState.FAILED] == 0
    assert await storage.remove([*IDS, *IDS[:5], "nobody"]) == 248

    left = await storage.status(IDS)
    assert {status.id: status.state for status in left if status} == {
        running.job_id: JobState.PROCESSING,
        IDS[10]: JobState.QUEUED,
    }
    assert await client.lrange(f"bull:{storage.queue}:wait", 0, -1) == [IDS[10]]


async def test_a_bulk_of_a_paused_queue_is_removed_at_once(own_server: ValkeyProcess) -> None:
    """The jobs wait in another list then, in which one walk finds them too, and those whose id is encoded there."""
    storage, ids = BullMQStorage(own_server.url), [*IDS, *(f"{each}.1" for each in IDS)]
    await storage.connect()
    await storage.enqueue([job(each) for each in ids])
    await storage.pause()
    assert await storage.remove(ids) == 500
    assert set((await storage.counts()).values()) == {0}
    with redis.Redis.from_url(own_server.url) as client:
        assert "cmdstat_watch" not in client.info("commandstats"), "none was looked at by itself"
    await storage.disconnect()


@pytest.mark.usefixtures("way")
async def test_a_bulk_beside_a_busy_worker_loses_nothing(storage: BullMQStorage) -> None:
    """While a worker claims the very jobs, each is either its own or removed."""
    await storage.enqueue([job(each) for each in IDS])
    claimed: list[str] = []

    async def work() -> None:
        while claims := await storage.claim("w", leases=LEASES, limit=3):
            claimed.extend(claim.job_id for claim in claims)

    removed, _ = await asyncio.gather(storage.remove(IDS), work())

    assert removed + len(claimed) == len(IDS)
    assert [status.id for status in await storage.status(IDS) if status] == sorted(claimed, key=IDS.index)


async def test_a_transaction_that_others_are_always_ahead_of_has_not_run(client: Any, redis_url: str) -> None:
    """The error says so, and means it."""
    key, other, server = f"test-{uuid.uuid4().hex}", redis.Redis.from_url(redis_url), BullMQServer(redis_url, PATIENCE)
    await server.open()

    def decide(_: object) -> list[tuple[str, ...]]:
        other.incr(key)
        return [("SET", key, "ours")]

    with pytest.raises(Contended):
        await server.transact([key], [("GET", key)], decide, rounds=3)
    assert await client.getdel(key) == "3"
    await server.close()
    other.close()


async def test_what_is_left_of_a_backlog_keeps_its_order(storage: BullMQStorage, client: Any) -> None:
    """Of 2 500 waiting jobs two in three are removed: nothing of them is left but an event for each."""
    ids = [f"job-{number}" for number in range(2_500)]
    await storage.enqueue([job(each) for each in ids])
    gone, kept = [each for number, each in enumerate(ids) if number % 3], ids[::3]

    assert await storage.remove([*gone, "nobody", gone[0]]) == len(gone)

    base = f"bull:{storage.queue}:"
    assert await client.lrange(f"{base}wait", 0, -1) == kept[::-1]
    assert set(await client.keys(f"{base}job-*")) == {base + each for each in kept}
    told = [fields for _, fields in await client.xrange(f"{base}events") if fields["event"] == "removed"]
    assert sorted(fields["jobId"] for fields in told) == sorted(gone)
    assert {fields["prev"] for fields in told} == {"wait"}
    assert [claim.job_id for claim in await storage.claim("w", leases=LEASES, limit=3)] == kept[:3]


@pytest.mark.parametrize("field", ["parentKey", "deid"])
async def test_a_waiting_job_that_others_refer_to_is_removed_as_bullmq_does(
    storage: BullMQStorage, client: Any, field: str
) -> None:
    """Its parent hears of it, and its deduplication key is free."""
    await storage.enqueue([job("a")])
    base = f"bull:{storage.queue}:"
    await client.hset(f"{base}a", field, f"{base}parent" if field == "parentKey" else "key")
    await client.hset(f"{base}parent", "name", "parent")
    await client.sadd(f"{base}parent:dependencies", f"{base}a", f"{base}b")
    await client.set(f"{base}de:key", "a")

    assert await storage.remove(["a"]) == 1

    assert await client.exists(f"{base}a") == 0
    assert await client.scard(f"{base}parent:dependencies") == (1 if field == "parentKey" else 2)
    assert await client.exists(f"{base}de:key") == (0 if field == "deid" else 1)
