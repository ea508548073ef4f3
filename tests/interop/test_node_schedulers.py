"""Job schedulers of BullMQ, kept going by our workers, by Node's, and by both in turn."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.interop.claims import LEASES, next_claim
from tests.interop.peer import BULLMQ, NodeProcess, install_npm_packages, scheduler_peer
from tests.patience import PATIENCE_SECONDS
from workers import JobState, Worker
from workers.errors import StorageError
from workers.jobs import Claim, Completed, ErrorInfo, Failed
from workers.storage.bullmq import BullMQStorage
from workers.worker.handlers import Job

EVERY = {"every": 300}
HOURLY = {"every": 3_600_000}
YEARLY = {"pattern": "@yearly", "tz": "UTC"}
EACH_SECOND = {"pattern": "* * * * * *", "tz": "Asia/Kolkata"}
TEMPLATE = {"name": "tick", "data": {"n": 1}, "opts": {"attempts": 3, "priority": 2, "removeOnComplete": 100}}

pytestmark = pytest.mark.spread("package")


@pytest.fixture
async def storage(redis_url: str) -> AsyncIterator[BullMQStorage]:
    storage = BullMQStorage(redis_url, f"schedulers-{uuid.uuid4().hex}")
    await storage.connect()
    yield storage
    await storage.disconnect()


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Any]:
    async with Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


@pytest.fixture
async def node(package: str, redis_url: str, storage: BullMQStorage) -> AsyncIterator[NodeProcess]:
    async with scheduler_peer(package, redis_url, storage.queue) as peer:
        yield peer


async def complete(storage: BullMQStorage, claim: Claim) -> str:
    await storage.settle([Completed(claim=claim, result=b"null")])
    return claim.job_id


async def run(storage: BullMQStorage, count: int) -> list[str]:
    """We ran so many jobs, one after the other; their ids."""
    return [await complete(storage, await next_claim(storage)) for _ in range(count)]


async def run_all(storage: BullMQStorage) -> list[str]:
    """We ran jobs until none was left; their ids."""
    ran: list[str] = []
    while await left(storage):
        ran += await run(storage, 1)
    return ran


async def left(storage: BullMQStorage) -> int:
    """How many jobs wait."""
    counts = await storage.counts()
    return counts[JobState.QUEUED] + counts[JobState.SCHEDULED]


def times(scheduler: str, ids: list[str]) -> list[int]:
    """When those of the jobs that belong to the scheduler were due."""
    return [int(one.rpartition(":")[2]) for one in ids if one.startswith(f"repeat:{scheduler}:")]


def ids_of(runs: list[dict[str, Any]]) -> list[str]:
    return [run["id"] for run in runs]


async def test_schedulers_live_on(storage: BullMQStorage, node: NodeProcess) -> None:
    """Node and we, in turn, run each time of a period and of a cron pattern once, with the template's data."""
    await node.call("upsert", ["period", EVERY, TEMPLATE])
    await node.call("upsert", ["cron:with:colons", EACH_SECOND, TEMPLATE])
    ran = await run(storage, 8)
    ran += ids_of(theirs := await node.call("work", 8))
    ran += await run(storage, 4)
    assert len(set(ran)) == len(ran)
    for scheduler, step in (("period", 300), ("cron:with:colons", 1_000)):
        due = times(scheduler, ran)
        assert len(due) >= 3
        assert due == sorted(due)
        assert {(later - due[1]) % step for later in due[1:]} == {0}
        found = await node.call("scheduler", scheduler)
        assert found["iterationCount"] == len(due) + 1
        assert found["next"] > due[-1]
    assert {(run["name"], run["data"]["n"]) for run in theirs} == {("tick", 1)}
    assert await left(storage) == 2


@pytest.mark.parametrize("repeat", [HOURLY | {"offset": 50, "limit": 9}, YEARLY | {"endDate": 4_000_000_000_000}])
async def test_what_we_add_is_what_node_adds(storage: BullMQStorage, node: NodeProcess, repeat: dict[str, Any]) -> None:
    """The options of the next job are the same, but for the times and the count."""
    await node.call("promote", await node.call("upsert", ["s", repeat, TEMPLATE]))

    async def following() -> tuple[str, dict[str, Any]]:
        [job] = (await storage.list(JobState.SCHEDULED)).jobs
        found: dict[str, Any] = await node.call("options", job.id)
        return job.id, found | {name: "some" for name in ("timestamp", "delay", "jobId", "prevMillis") if name in found}

    await node.call("work", 1)
    second, theirs = await following()
    await node.call("promote", second)
    await run(storage, 1)
    third, ours = await following()
    assert ours == theirs | {"repeat": theirs["repeat"] | {"count": theirs["repeat"]["count"] + 1}}
    assert times("s", [third])[0] > times("s", [second])[0]


async def test_a_limit_ends_a_schedule(storage: BullMQStorage, node: NodeProcess) -> None:
    """It is kept by both: Node ran the first, we run the others, and nothing is left."""
    await node.call("upsert", ["s", EVERY | {"limit": 4}, TEMPLATE])
    ran = ids_of(await node.call("work", 1)) + await run_all(storage)
    assert len(set(ran)) == len(ran) == 4


async def test_an_end_ends_a_schedule(storage: BullMQStorage, node: NodeProcess) -> None:
    """By a pattern, nothing is due after the end; by a period, nothing is added after it. The last job runs."""
    end = int(time.time() * 1_000) + 1_000
    await node.call("upsert", ["period", EVERY | {"endDate": end}, TEMPLATE])
    first = await node.call("upsert", ["cron", YEARLY | {"endDate": _new_year_ms() - 1, "immediately": True}, TEMPLATE])
    ran = await run_all(storage)
    assert times("period", ran)[-1] <= end + 300
    assert times("cron", ran) == times("cron", [first])


async def test_a_start_is_waited_for(storage: BullMQStorage, node: NodeProcess) -> None:
    """Even if the first job is run before its time, the second is due after the start."""
    start = _new_year_ms() + 90_000_000
    for name, repeat in (("period", HOURLY), ("cron", {"pattern": "30 1 * * *", "tz": "UTC"})):
        first = await node.call("upsert", [name, repeat | {"startDate": start}, TEMPLATE])
        await node.call("promote", first)
    ran = await run(storage, 2)
    waiting = [job.id for job in (await storage.list(JobState.SCHEDULED)).jobs]
    assert (times("period", ran), times("period", waiting)) == ([start], [start + 3_600_000])
    assert (times("cron", ran), times("cron", waiting)) == ([start + 1_800_000], [start + 88_200_000])


def _new_year_ms() -> int:
    """When the next year begins, at UTC."""
    return int(datetime(datetime.now(UTC).year + 1, 1, 1, tzinfo=UTC).timestamp() * 1_000)


async def test_a_change_meanwhile_counts(storage: BullMQStorage, node: NodeProcess) -> None:
    """A job that is claimed again after its schedule has changed, or is gone, adds nothing."""
    await node.call("upsert", ["s", HOURLY, TEMPLATE])
    claim = await next_claim(storage)
    changed = await node.call("upsert", ["s", YEARLY, TEMPLATE])
    await storage.settle([Failed(claim=claim, error=ErrorInfo(type="ValueError", message="no"))])
    assert await storage.retry([claim.job_id]) == 1
    assert (await next_claim(storage)).job_id == claim.job_id
    waiting = (await storage.list(JobState.SCHEDULED)).jobs
    assert [job.id for job in waiting] == [changed]
    await node.call("remove", "s")
    assert await run_all(storage) == []


async def test_what_we_cannot_read_is_left_to_node(storage: BullMQStorage, node: NodeProcess) -> None:
    """A pattern that Node's versions read differently is told once, is not run by us, and goes on with Node."""
    repeat = {"pattern": "* * * * * 1-7/4", "immediately": True}
    odd = await node.call("upsert", ["odd", repeat, TEMPLATE])
    await node.call("upsert", ["fine", EACH_SECOND, TEMPLATE])
    errors: list[BaseException] = []
    ran: list[str] = []
    done = asyncio.Event()

    async def handle(job: Job) -> None:
        ran.append(job.id)
        if len(ran) == 3:
            done.set()

    worker = Worker(
        storage, {"*": handle}, observers=[lambda event: errors.append(event.error) if event.error else None]
    )
    async with asyncio.timeout(PATIENCE_SECONDS):
        running = asyncio.create_task(worker.run())
        await done.wait()
        worker.stop()
        await running
    assert times("odd", ran) == []
    assert ["'1-7/4'" in str(error) for error in errors if "'odd'" in str(error)] == [True]
    await node.call("promote", odd)
    while odd not in ids_of(await node.call("work", 1)):
        pass
    assert (await node.call("scheduler", "odd"))["iterationCount"] >= 2


async def test_a_repeatable_job_of_bullmq_5_goes_on(redis_url: str, storage: BullMQStorage) -> None:
    """What `add` with `repeat` makes is a scheduler, as it is to Node 5's own worker."""
    install_npm_packages()
    async with scheduler_peer(BULLMQ["5"], redis_url, storage.queue) as old:
        await old.call("add", ["rep", {"n": 2}, {"repeat": EVERY}])
        ran = await run(storage, 2)
        runs = await old.call("work", 2)
        ran += ids_of(runs)
        assert [run["data"] for run in runs] == [{"n": 2}] * 2
        assert len(set(ran)) == 4
    claim = await next_claim(storage)
    assert (claim.name, claim.payload) == ("rep", b'{"n":2}')


async def test_an_older_repeatable_job_is_left_to_node_5(redis_url: str, storage: BullMQStorage, client: Any) -> None:
    """Its key has five parts and no scheduler: it is given back, and told."""
    key, job = "rep::::* * * * * *", "repeat:0f3c:1700000000000"
    base = f"bull:{storage.queue}:"
    options = '{"repeat":{"pattern":"* * * * * *"},"prevMillis":1700000000000}'
    await client.zadd(f"{base}repeat", {key: 1_700_000_000_000})
    await client.hset(
        f"{base}{job}", mapping={"name": "rep", "data": "{}", "opts": options, "timestamp": 1, "rjk": key}
    )
    await client.lpush(f"{base}wait", job)
    assert await storage.claim("w", leases=LEASES, limit=1) == []
    with pytest.raises(StorageError, match="repeatable job"):
        await storage.claim("w", leases=LEASES, limit=1)
    assert await client.zrange(f"{base}delayed", 0, -1) == [job]
