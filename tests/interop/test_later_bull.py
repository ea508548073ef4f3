"""Queues of Bull 3 and 4 are left to them, and no queue of BullMQ is taken for one of theirs."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator, Mapping
from datetime import timedelta
from typing import Any, Final

import pytest
from redis.asyncio import Redis

from tests.interop.peer import NodePeer, NodeProcess, flow_peer, later_bull_peer
from tests.patience import until
from tests.workers.running import Recorder, done, running
from workers import Worker, WorkerOptions
from workers.errors import ForeignQueue
from workers.jobs import Claim
from workers.storage.base import Storage
from workers.storage.bull import BullStorage
from workers.storage.bullmq import BullMQStorage
from workers.storage.on_redis import ownership
from workers.testing.steps import job
from workers.worker.events import WorkerEventKind

PLAIN: Final[dict[str, Any]] = {"data": {"n": 1}, "opts": {}}
THEIRS: Final[Mapping[str, dict[str, Any]]] = {
    "plain": PLAIN,
    "named": {"name": "mail", "data": {}, "opts": {"attempts": 3, "backoff": 500, "jobId": "mail-1"}},
    "delayed": {"data": {}, "opts": {"delay": 3_600_000}},
    "priority": {"data": {}, "opts": {"priority": 3}},
    "repeated": {"data": {}, "opts": {"repeat": {"every": 3_600_000}}},
}
"""What may lie in a queue of Bull 3 or 4; where its workers have run, there is more."""


class CountedBull(BullStorage):
    """It tells how often it was asked for jobs."""

    asked = 0

    async def claim(self, worker_id: str, *, leases: Mapping[str, timedelta], limit: int) -> list[Claim]:
        self.asked += 1
        return await super().claim(worker_id, leases=leases, limit=limit)


class CountedBullMQ(BullMQStorage):
    """Likewise."""

    asked = 0

    async def claim(self, worker_id: str, *, leases: Mapping[str, timedelta], limit: int) -> list[Claim]:
        self.asked += 1
        return await super().claim(worker_id, leases=leases, limit=limit)


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    """For the queues' bytes."""
    async with Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture(params=["3", "4"])
async def peer(
    npm_packages: None, redis_url: str, unopened: CountedBull | CountedBullMQ, request: pytest.FixtureRequest
) -> AsyncIterator[NodeProcess]:
    """Bull 3 or 4, on the queue `unopened`."""
    async with later_bull_peer(request.param, redis_url, unopened.queue) as peer:
        yield peer


@pytest.fixture(params=[CountedBull, CountedBullMQ], ids=["bull", "bullmq"])
def unopened(redis_url: str, request: pytest.FixtureRequest) -> CountedBull | CountedBullMQ:
    storage: CountedBull | CountedBullMQ = request.param(redis_url, f"later-{uuid.uuid4().hex}")
    return storage


async def everything(client: Redis, queue: str) -> dict[bytes, bytes]:
    """All keys of the queue, as they are stored."""
    return {key: await client.dump(key) async for key in client.scan_iter(f"bull:{queue}:*", count=1_000)}


async def forget(client: Redis, queue: str) -> None:
    await client.delete(*await everything(client, queue))


@pytest.mark.parametrize("there", THEIRS)
async def test_a_queue_of_bull_3_or_4_is_refused(
    there: str, peer: NodeProcess, unopened: CountedBull | CountedBullMQ, client: Redis
) -> None:
    """By its name, whatever lies in it, before anything is written; a worker does not start."""
    await peer.call("add", [THEIRS[there]])
    before = await everything(client, unopened.queue)
    with pytest.raises(ForeignQueue, match=f"bull:{unopened.queue}:.*Bull 3 or newer: leave it to them"):
        await unopened.connect()
    with pytest.raises(ForeignQueue):
        await Worker(unopened, {"*": done}).run()
    assert await everything(client, unopened.queue) == before
    assert unopened.asked == 0


async def test_a_queue_whose_jobs_have_ended_is_refused(
    peer: NodeProcess, unopened: CountedBull | CountedBullMQ, client: Redis
) -> None:
    """Their records tell."""
    await peer.call("add", [PLAIN])
    await peer.call("work")
    await peer.kill()
    with pytest.raises(ForeignQueue, match="Bull 3 or newer"):
        await unopened.connect()


@pytest.mark.parametrize("there", THEIRS)
async def test_jobs_of_bull_that_come_while_a_worker_runs(
    there: str,
    peer: NodeProcess,
    unopened: CountedBull | CountedBullMQ,
    client: Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are told once and left alone; the queue is used again when they have gone."""
    monkeypatch.setattr(ownership, "LOOK_SECONDS", 0.1)
    recorder = Recorder()
    worker = Worker(
        unopened, {"*": done}, observers=[recorder], options=WorkerOptions(poll_interval=timedelta(seconds=1))
    )
    async with running(worker):
        await recorder.seen(WorkerEventKind.READY)
        await peer.call("add", [THEIRS[there]])
        counts = await peer.call("counts")
        event = await recorder.seen(WorkerEventKind.ERROR)
        assert isinstance(event.error, ForeignQueue)
        asked = unopened.asked
        await until(lambda: unopened.asked >= asked + 3)
        assert len(recorder.of(WorkerEventKind.ERROR)) == 1
        assert recorder.of(WorkerEventKind.ACTIVE) == []
        assert await peer.call("counts") == counts
        await peer.kill()
        await forget(client, unopened.queue)
        await until(lambda: takes_jobs(unopened))
        await recorder.seen(WorkerEventKind.COMPLETED)
    assert len(recorder.of(WorkerEventKind.ERROR)) == 1


async def takes_jobs(storage: Storage) -> bool:
    try:
        await storage.enqueue([job("ours")])
    except ForeignQueue:
        return False
    return True


async def test_a_queue_of_both_is_opened_with_a_warning(
    npm_packages: None, redis_url: str, storage: BullMQStorage, caplog: pytest.LogCaptureFixture
) -> None:
    """Where BullMQ has written, too, nothing tells surely whose jobs those of Bull are."""
    await storage.enqueue([job("ours")])
    async with later_bull_peer("4", redis_url, storage.queue) as bull:
        await bull.call("add", [PLAIN])
    await open_again(redis_url, storage)
    assert [one.getMessage() for one in caplog.records if "has jobs like theirs: if workers of Bull 3" in one.message]


OPTIONS: Final[list[dict[str, Any]]] = [
    {},
    {"attempts": 5, "backoff": {"type": "exponential", "delay": 1_000}, "removeOnComplete": True},
    {"delay": 3_600_000, "attempts": 2},
    {"priority": 7, "timestamp": 1_700_000_000_000},
    {"jobId": "chosen", "delay": 3_600_000, "timestamp": 1_700_000_000_000},
]
"""With which a producer of BullMQ adds jobs."""


async def open_again(url: str, storage: BullMQStorage) -> None:
    """Another storage of ours opens its queue."""
    other = BullMQStorage(url, storage.queue)
    await other.connect()
    await other.disconnect()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged of the queue's owner."""
    return [one.getMessage() for one in caplog.records if one.name == ownership.__name__]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "none")
async def test_queues_of_nodes_bullmq_are_opened(
    options: dict[str, Any], node: NodePeer, redis_url: str, storage: BullMQStorage, caplog: pytest.LogCaptureFixture
) -> None:
    """One job is enough to know whose it is, whatever its options."""
    await node.add({"name": "mail", "data": {"n": 1}, "opts": options})
    await open_again(redis_url, storage)
    assert told(caplog) == []


async def test_schedulers_and_workers_of_nodes_bullmq_are_known(
    node: NodePeer, redis_url: str, storage: BullMQStorage, caplog: pytest.LogCaptureFixture
) -> None:
    """So is a queue with a scheduler, and one whose jobs have ended."""
    template = {"name": "tick", "data": {}, "opts": {"attempts": 3}}
    await node.manage("upsertJobScheduler", "hourly", {"every": 3_600_000}, template)
    await open_again(redis_url, storage)
    await node.add({"name": "mail", "data": {}, "opts": {}})
    await node.work(1)
    await open_again(redis_url, storage)
    assert told(caplog) == []


async def test_a_queue_that_only_a_flow_producer_wrote_is_opened(
    package: str, redis_url: str, storage: BullMQStorage, caplog: pytest.LogCaptureFixture
) -> None:
    """It makes no `Queue`, whose constructor describes the queue."""
    async with flow_peer(package, redis_url) as flows:
        child = {"name": "child", "queueName": f"{storage.queue}-child", "data": {}}
        await flows.add({"name": "parent", "queueName": storage.queue, "data": {}, "children": [child]})
    await open_again(redis_url, storage)
    await open_again(redis_url, BullMQStorage(redis_url, f"{storage.queue}-child"))
    assert told(caplog) == []


@pytest.mark.parametrize(
    "ours", [{}, {"delay": timedelta(hours=1)}, {"priority": 3}, {"max_attempts": 5}], ids=lambda ours: "-".join(ours)
)
async def test_our_own_queue_is_opened(
    ours: dict[str, Any], redis_url: str, storage: BullMQStorage, caplog: pytest.LogCaptureFixture
) -> None:
    """An `enqueue` of ours is enough."""
    with caplog.at_level(logging.WARNING):
        await storage.enqueue([job("one", **ours)])
        await open_again(redis_url, storage)
    assert told(caplog) == []
