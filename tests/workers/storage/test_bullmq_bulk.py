"""Many jobs of a BullMQ queue are changed at once: together where nobody is at them, else one by one."""

from __future__ import annotations

import asyncio
import uuid
from datetime import timedelta
from typing import Any

import pytest
import redis

from tests.workers.storage.bullmq_steps import ERROR, LEASES, job
from workers import JobState
from workers.jobs import Failed
from workers.storage import bullmq_jobs
from workers.storage.bullmq import BullMQStorage
from workers.storage.bullmq_lua import OLDEST_FIRST, Script, scripts
from workers.storage.bullmq_server import Contended, Server

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
    key, other, server = f"test-{uuid.uuid4().hex}", redis.Redis.from_url(redis_url), Server(redis_url, PATIENCE)
    await server.open()

    def decide(_: object) -> list[tuple[str, ...]]:
        other.incr(key)
        return [("SET", key, "ours")]

    with pytest.raises(Contended):
        await server.transact([key], [("GET", key)], decide, rounds=3)
    assert await client.getdel(key) == "3"
    await server.close()
    other.close()


@pytest.mark.parametrize("name", OLDEST_FIRST)
def test_waiting_jobs_are_searched_from_the_old_end(name: str) -> None:
    """The installed package has the call that is replaced, once, and nothing else is."""
    theirs, (replaced, ours) = Script(name).text, OLDEST_FIRST[name]
    assert theirs.count(replaced) == 1
    assert scripts()[name].text == theirs.replace(replaced, ours)
