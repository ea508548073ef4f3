"""A BullMQ queue that Node pauses, or limits, while our worker runs: what may run does at once, and nothing else."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from tests.interop.claims import LEASES
from tests.interop.peer import NodePeer
from tests.patience import until
from tests.workers.running import Crowd, running
from workers import JobState, Limit, Worker
from workers.jobs import ErrorInfo, Failed, NewJob, Released
from workers.storage.bullmq import BullMQStorage
from workers.storage.bullmq import waiting as bullmq_wait
from workers.worker.handlers import Job

HOUR_MS = 3_600_000

pytestmark = pytest.mark.spread("package")


@pytest.fixture
def no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiters look at the queue before they block and not again, so that only a wake-up ends a wait."""
    monkeypatch.setattr(bullmq_wait, "LOOK_SECONDS", 3_600.0)
    monkeypatch.setattr(bullmq_wait, "BARRED_LOOK_SECONDS", 3_600.0)


async def _completed(storage: BullMQStorage, count: int) -> bool:
    return (await storage.counts())[JobState.COMPLETED] == count


async def _add(node: NodePeer, count: int) -> list[str]:
    return await node.add(*({"name": "n", "data": {}} for _ in range(count)))


@pytest.mark.usefixtures("no_second_look")
async def test_a_freed_slot_of_the_queue_is_taken_at_once(storage: BullMQStorage, node: NodePeer) -> None:
    """With Node's global concurrency, no more run at once, and the end of one wakes who waits for its slot."""
    await node.manage("setGlobalConcurrency", 2)
    await _add(node, 12)
    inside, peaks = 0, []

    async def run(job: Job) -> None:
        nonlocal inside
        inside += 1
        peaks.append(inside)
        await asyncio.sleep(0.01)
        inside -= 1

    async with running(Worker(storage, {"*": run}), Worker(storage, {"*": run})):
        await until(lambda: _completed(storage, 12))
    assert len(peaks) == 12
    assert max(peaks) <= 2


@pytest.mark.usefixtures("no_second_look")
async def test_a_pause_in_the_middle(storage: BullMQStorage, node: NodePeer) -> None:
    """What runs when Node pauses the queue ends; nothing else begins, before Node resumes it."""
    crowd = Crowd()
    await node.manage("setGlobalConcurrency", 2)
    await _add(node, 6)
    async with running(Worker(storage, {"*": crowd})):
        await until(lambda: crowd.inside == 2)
        await node.manage("pause")
        crowd.open.set()
        await until(lambda: _completed(storage, 2))
        assert await storage.claim("another", leases=LEASES, limit=5) == []
        assert len(crowd.runs) == 2
        await node.manage("resume")
        await until(lambda: _completed(storage, 6))
    assert len(set(crowd.runs)) == 6


async def test_a_rate_limit_in_the_middle(
    storage: BullMQStorage, node: NodePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many run as Node's limit lets through, out of one batch; a look finds that the limit was raised."""
    monkeypatch.setattr(bullmq_wait, "BARRED_LOOK_SECONDS", 0.05)
    crowd = Crowd()
    crowd.open.set()
    await node.manage("setGlobalRateLimit", 3, HOUR_MS)
    await _add(node, 6)
    async with running(Worker(storage, {"*": crowd}, concurrency=6)):
        await until(lambda: _completed(storage, 3))
        assert await storage.claim("another", leases=LEASES, limit=5) == []
        assert len(crowd.runs) == 3
        await node.manage("setGlobalRateLimit", 1_000, HOUR_MS)
        await until(lambda: _completed(storage, 6))
    assert len(set(crowd.runs)) == 6


async def test_node_keeps_our_concurrency(storage: BullMQStorage, node: NodePeer) -> None:
    """A worker of Node, with room for all jobs, runs as many at once as we declared for the queue."""
    await storage.declare_limits({"*": Limit(concurrency=2)})
    assert await node.manage("getGlobalConcurrency") == 2
    await node.add(*({"name": "n", "data": {"ms": 20}} for _ in range(8)))
    await node.work(8, concurrency=8)
    assert await node.call("peak") == 2


async def test_node_keeps_our_rate(storage: BullMQStorage, node: NodePeer) -> None:
    """A worker of Node starts as many as we declared for the time, and ours none beside, until we raise the rate."""
    await storage.declare_limits({"*": Limit("3/h")})
    assert await node.manage("getGlobalRateLimit") == {"max": 3, "duration": HOUR_MS}
    await _add(node, 6)
    assert len(await node.work(3, concurrency=6)) == 3
    assert await storage.claim("ours", leases=LEASES, limit=5) == []
    assert await _completed(storage, 3)
    await storage.declare_limits({"*": Limit("1000/h")})
    assert len(await node.work(6, concurrency=6)) == 6


async def test_limits_that_node_set_are_listed_and_removed(storage: BullMQStorage, node: NodePeer) -> None:
    """As that of the whole queue."""
    await node.manage("setGlobalConcurrency", 2)
    await node.manage("setGlobalRateLimit", 30, 90_000)
    assert await storage.declared_limits() == {"*": Limit("30/90s", concurrency=2)}
    assert await storage.remove_limit("*")
    assert await node.manage("getGlobalConcurrency") is None
    assert await node.manage("getGlobalRateLimit") is None


async def test_what_comes_during_nodes_pause_is_there_when_node_resumes(storage: BullMQStorage, node: NodePeer) -> None:
    """Whatever brings a job back while the queue is paused, it stands in line afterwards, in its place."""
    await _add(node, 1)
    await storage.enqueue([NewJob(id=name, name="n", payload=b"{}") for name in ("failed", "released", "crashed", "x")])
    first, *claims = await storage.claim("ours", leases=LEASES, limit=3)
    [crashed] = await storage.claim("ours", leases={"*": timedelta(milliseconds=50)}, limit=1)
    await storage.enqueue([NewJob(id="late", name="n", payload=b"{}", delay=timedelta(hours=1))])
    await node.manage("pause")
    error = ErrorInfo(type="ValueError", message="no")
    await storage.settle([Released(claim=first), Failed(claim=claims[0], error=error), Released(claim=claims[1])])
    await storage.enqueue([NewJob(id="new", name="n", payload=b"{}")])
    assert await storage.retry(["failed"]) == 1
    assert await storage.promote(["late"]) == 1

    async def back() -> bool:
        return crashed.job_id in (await storage.recover(100)).requeued

    await until(back)
    assert (await storage.counts())[JobState.QUEUED] == 7
    await node.manage("resume")
    ids = [claim.job_id for claim in await storage.claim("ours", leases=LEASES, limit=10)]
    assert ids == ["crashed", "released", first.job_id, "x", "new", "failed", "late"]


async def test_what_waited_when_we_paused_is_there_when_node_resumes(storage: BullMQStorage, node: NodePeer) -> None:
    """What Node adds meanwhile does not take the place of the jobs that waited."""
    waited = await _add(node, 3)
    await storage.pause()
    added = await _add(node, 2)
    await node.manage("resume")
    ids = [claim.job_id for claim in await storage.claim("ours", leases=LEASES, limit=10)]
    assert ids == [*waited, *added]
