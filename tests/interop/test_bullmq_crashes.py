"""Workers that vanish, on a BullMQ queue which Node works on too: a crash costs each job what its producer expects."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.interop.peer import NodePeer
from tests.patience import until
from tests.workers.running import done, outcome, running
from workers import JobState, Worker
from workers.jobs import JobStatus, NewJob
from workers.storage.bullmq import BullMQStorage

LEASE = timedelta(seconds=5)
NODES_REASON = "job stalled more than allowable limit"

pytestmark = pytest.mark.spread("package")


async def _lapse(storage: BullMQStorage) -> str:
    """A worker of ours took a job and vanished; a reaper has found it."""
    [held] = await storage.claim("vanished", leases={"*": timedelta(milliseconds=50)}, limit=1)
    assert held.stalled is None

    async def back() -> bool:
        return held.job_id in (await storage.recover(100)).requeued

    await until(back)
    return held.job_id


async def _status(storage: BullMQStorage, job_id: str) -> JobStatus:
    [found] = await storage.status([job_id])
    assert found is not None
    return found


async def test_a_crash_is_no_attempt_of_a_node_job(storage: BullMQStorage, node: NodePeer) -> None:
    """What a killed Node worker held runs here, though its jobs have one attempt; of one of ours, it was the one."""
    added = await node.add(*({"name": "plain", "data": {}} for _ in range(10)))
    await storage.enqueue([NewJob(id="ours", name="n", payload=b"{}", max_attempts=1)])
    await node.hold(11, lockDuration=1_000)
    await node.kill()
    async with running(Worker(storage, {"*": done}, lease=LEASE)):
        await until(lambda: _ended(storage, 11))
    counts = await storage.counts()
    assert (counts[JobState.COMPLETED], counts[JobState.FAILED]) == (10, 1)
    assert {(await _status(storage, job_id)).attempt for job_id in added} == {1}
    ours = await _status(storage, "ours")
    assert ours.last_error is not None
    assert (ours.attempt, ours.state, ours.last_error.type) == (1, JobState.FAILED, "StalledError")


async def _ended(storage: BullMQStorage, count: int) -> bool:
    counts = await storage.counts()
    return counts[JobState.COMPLETED] + counts[JobState.FAILED] == count


async def test_the_second_crash_fails_a_node_job_as_in_node(storage: BullMQStorage, node: NodePeer) -> None:
    """Who gives the job up, our worker or Node's, writes the same; its attempts do not matter."""
    for worker in ("ours", "node"):
        await node.add({"name": "plain", "data": {}, "opts": {"jobId": worker, "attempts": 9}})
        assert await _lapse(storage) == worker
        assert await _lapse(storage) == worker
        if worker == "node":
            assert await node.work(1) == []
            continue
        async with running(Worker(storage, {"*": done}, lease=LEASE)):
            await outcome(storage, worker)
    ours, theirs = await node.read("ours"), await node.read("node")
    assert [(one["state"], one["failedReason"], one["attemptsMade"]) for one in (ours, theirs)] == [
        ("failed", NODES_REASON, 1)
    ] * 2
    read = [await _status(storage, worker) for worker in ("ours", "node")]
    assert [(one.attempt, one.state, one.last_error and one.last_error.message) for one in read] == [
        (1, JobState.FAILED, NODES_REASON)
    ] * 2


async def test_our_crash_is_no_attempt_in_node(storage: BullMQStorage, node: NodePeer) -> None:
    """What we held when we vanished, a Node worker runs; what had been lost before, it fails."""
    await node.add({"name": "plain", "data": {}, "opts": {"jobId": "twice"}})
    await _lapse(storage)
    await node.add(*({"name": "plain", "data": {}, "opts": {"jobId": name}} for name in ("a", "b")))
    claims = await storage.claim("vanished", leases={"*": timedelta(milliseconds=50)}, limit=3)
    assert {claim.job_id for claim in claims} == {"twice", "a", "b"}
    runs = await node.work(3, stalledInterval=100)
    assert sorted(run["id"] for run in runs) == ["a", "b"]
    found = await node.read("twice")
    assert (found["state"], found["failedReason"]) == ("failed", NODES_REASON)
    assert (await _status(storage, "a")).state is JobState.COMPLETED
