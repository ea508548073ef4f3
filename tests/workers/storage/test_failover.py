"""Queues on servers that stand in for each other: a master dies or is replaced while jobs run, and work goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from itertools import count

import pytest
from redis.crc import key_slot

from tests.deployments import SERVICE, Cluster, Watched, ask, cluster, watched
from tests.patience import PATIENCE_SECONDS, until
from tests.workers.running import running
from workers import JobState, StorageUnavailable, WorkerOptions
from workers.errors import NotReplicated
from workers.storage.base import Storage
from workers.storage.bull import BullStorage
from workers.storage.bullmq import BullMQStorage
from workers.storage.redis import RedisStorage
from workers.storage.redis.scripts import base
from workers.testing.steps import job
from workers.worker import Worker
from workers.worker.handlers import Job

CONFIRMED = "wait_replicas=1&wait_timeout_ms=300"
LEASE = timedelta(seconds=3)
TIMEOUT = timedelta(seconds=2)
SOME, FEW = 20, 2


class Work:
    """A queue into which jobs go without an end, and a worker that does them."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.acknowledged: list[str] = []
        self.unconfirmed: list[str] = []
        self.refused = 0

    async def produce(self) -> None:
        """A producer that does not try again what was not acknowledged."""
        for number in count():
            try:
                await self.storage.enqueue([job(f"job-{number}", max_attempts=100)])
                self.acknowledged.append(f"job-{number}")
            except NotReplicated:
                self.unconfirmed.append(f"job-{number}")
            except StorageUnavailable:
                self.refused += 1
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.02)

    async def more(self, enqueued: list[str], count: int) -> None:
        wanted = len(enqueued) + count
        await until(lambda: len(enqueued) >= wanted)

    async def lost(self) -> list[str]:
        """The acknowledged jobs that are neither done nor to be done."""
        states = await self.storage.status(self.acknowledged)
        return [name for name, status in zip(self.acknowledged, states, strict=True) if status is None]

    async def is_done(self) -> bool:
        try:
            states = await self.storage.status(self.acknowledged)
        except StorageUnavailable:
            return False
        return all(status is None or status.state is JobState.COMPLETED for status in states)


@asynccontextmanager
async def at_work(*storages: Storage) -> AsyncIterator[list[Work]]:
    """Jobs are produced and done in each; when the block ends, no acknowledged job is lost, and all get done."""

    async def handle(job: Job) -> None:
        await asyncio.sleep(0.001)

    works = [Work(storage) for storage in storages]
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        for storage in storages:
            await storage.connect()
            stack.push_async_callback(storage.disconnect)
            worker = Worker(storage, {"*": handle}, concurrency=5, lease=LEASE, options=WorkerOptions(max_stalls=100))
            await stack.enter_async_context(running(worker))
        producers = [tasks.create_task(work.produce()) for work in works]
        for work in works:
            await work.more(work.acknowledged, SOME)
        yield works
        for producer in producers:
            producer.cancel()
        for work in works:
            assert await work.lost() == []
            await until(work.is_done)


@pytest.fixture
def servers() -> Iterator[Cluster]:
    with cluster() as found:
        yield found


@pytest.fixture
def observed() -> Iterator[Watched]:
    with watched() as found:
        yield found


async def test_a_master_of_a_cluster_dies(servers: Cluster) -> None:
    """No acknowledged job is lost, and work goes on by itself; also when the dead server is back as a replica."""
    await servers.ready()
    master = servers.master_of(b"{bull}")
    queue = next(str(number) for number in count() if servers.master_of(base("workers", str(number))) is master)
    ours = RedisStorage(f"{servers.url}?{CONFIRMED}", queue)
    bullmq = BullMQStorage(f"bullmq+{servers.url}?{CONFIRMED}", prefix="{bull}")
    async with asyncio.timeout(PATIENCE_SECONDS), at_work(ours, bullmq) as works:
        master.kill()
        await until(lambda: servers.master_of(b"{bull}") is not master)
        for work in works:
            await work.more(work.unconfirmed, FEW)
        master.start()
        for work in works:
            await work.more(work.acknowledged, SOME)


ENDS = {
    "replaced": lambda observed: ask(observed.sentinel, "SENTINEL", "FAILOVER", SERVICE),
    "dead": lambda observed: observed.master.kill(),
    "hung": lambda observed: observed.master.hang(),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
async def test_a_master_behind_sentinels(end: Callable[[Watched], object], observed: Watched) -> None:
    """An operator replaces the master, or it dies or hangs: no acknowledged job is lost, and work goes on.

    At first nobody is left to confirm anything. Producers are told, but their jobs are stored and done.
    """
    await observed.ready()
    first, second = observed.servers
    url = f"{observed.url}?{CONFIRMED}"
    storages = (
        RedisStorage(url, timeout=TIMEOUT),
        BullMQStorage(f"bullmq+{url}", timeout=TIMEOUT),
        BullStorage(f"bull+{url}", "mail", timeout=TIMEOUT),
    )
    async with asyncio.timeout(PATIENCE_SECONDS), at_work(*storages) as works:
        assert observed.master is first
        end(observed)
        await until(lambda: observed.master is second)
        for work in works:
            await work.more(work.unconfirmed, FEW)
        for work in works:
            assert await work.storage.status(work.unconfirmed[-1:]) != [None]


async def test_a_slot_moves_to_another_server() -> None:
    """Neither producers nor workers notice when a cluster moves a queue as a whole, and nothing of it stays behind."""
    with cluster(masters=2, replicas=0) as servers:
        await servers.ready()
        former = servers.master_of(base("workers", "moved"))
        [other] = [node for node in servers.nodes if node is not former]
        slot = key_slot(base("workers", "moved"))
        async with asyncio.timeout(PATIENCE_SECONDS), at_work(RedisStorage(servers.url, "moved")) as [work]:
            ask(former, "CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", other.id)
            await until(lambda: servers.master_of(base("workers", "moved")) is other)
            await work.more(work.acknowledged, SOME)
            assert work.refused == 0
        assert ask(former, "DBSIZE") == 0


async def test_a_queue_rests_while_its_slot_moves_key_by_key() -> None:
    """Some of its keys would be missing wherever it worked meanwhile. So nothing is changed, and nothing is lost."""
    with cluster(masters=2, replicas=0) as servers:
        await servers.ready()
        tag = base("workers", "moved")
        former, slot = servers.master_of(tag), key_slot(tag)
        [other] = [node for node in servers.nodes if node is not former]
        storage = RedisStorage(servers.url, "moved")
        await storage.connect()
        await storage.enqueue([job("before")])
        ask(other, "CLUSTER", "SETSLOT", slot, "IMPORTING", former.id)
        ask(former, "CLUSTER", "SETSLOT", slot, "MIGRATING", other.id)
        with pytest.raises(StorageUnavailable):
            await storage.enqueue([job("meanwhile")])
        assert ask(other, "DBSIZE") == 0
        for key in ask(former, "CLUSTER", "GETKEYSINSLOT", slot, 100):
            ask(former, "MIGRATE", "127.0.0.1", other.port, key, 0, 5000)
        for node in (other, former):
            ask(node, "CLUSTER", "SETSLOT", slot, "NODE", other.id)
        await storage.enqueue([job("after")])
        found = await storage.status(["before", "meanwhile", "after"])
        assert [status is not None for status in found] == [True, False, True]
        await storage.disconnect()
