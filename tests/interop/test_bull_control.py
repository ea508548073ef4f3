"""Who manages a Bull queue from Node and who does from here see and respect each other's steps."""

from __future__ import annotations

import json
from datetime import timedelta
from functools import partial

import pytest
from redis.asyncio import Redis

from tests.interop.bull_jobs import Obedient
from tests.interop.bull_queue import ERROR, Ids, a_job, ended, status, unlocked
from tests.interop.claims import LEASES, next_claim
from tests.interop.peer import BullPeer, bull_peer
from tests.patience import eventually
from tests.workers.running import AT_ONCE, running
from workers import JobState, JobStatus, Worker, WorkerOptions
from workers.jobs import Cancelled, Completed, EnqueueStatus, Failed, RepairOutcome
from workers.storage.bull import BullStorage

LATER = timedelta(minutes=1)


async def test_a_pause_from_here_holds_node_back(queue: BullStorage, peer: BullPeer, ids: Ids) -> None:
    """What is added to a queue paused here, or promoted in it, waits for Node's `resume`; no job is lost."""
    before, after, late = ids(), ids(), ids()
    await queue.enqueue([a_job(before, {})])
    await queue.pause()
    await peer.work(concurrency=1)
    theirs = await peer.add({})
    await queue.enqueue([a_job(after, {}), a_job(late, {}, delay=LATER)])
    assert await queue.promote([late]) == 1
    assert await queue.claim("ours", leases=LEASES, limit=5) == []
    assert [(await peer.read(one))["state"] for one in (before, theirs, after, late)] == ["paused"] * 4
    assert await peer.runs() == []
    await peer.call("resume")
    await eventually(peer.runs, lambda runs: [run["id"] for run in runs] == [before, theirs, after, late])


@pytest.mark.spread("version")
async def test_a_pause_from_node_holds_us_back(queue: BullStorage, peer: BullPeer, ids: Ids) -> None:
    """What is added to a queue that Node paused waits, also for us, until we resume it."""
    theirs, ours = await peer.add({}), ids()
    await peer.call("pause")
    await queue.enqueue([a_job(ours, {})])
    assert await queue.claim("ours", leases=LEASES, limit=5) == []
    await queue.resume()
    assert [claim.job_id for claim in await queue.claim("ours", leases=LEASES, limit=5)] == [theirs, ours]


@pytest.mark.spread("version")
async def test_what_falls_due_while_paused_outlives_nodes_resume(
    queue: BullStorage, npm_packages: None, redis_url: str, version: str, ids: Ids
) -> None:
    """A worker of ours puts a due job among the paused ones, where a `resume` of Node's does not overwrite it."""
    names, late = [ids() for _ in range(3)], ids()
    await queue.pause()
    await queue.enqueue([*(a_job(name, {}) for name in names), a_job(late, {}, delay=timedelta(milliseconds=300))])
    async with Redis.from_url(redis_url) as client, running(Worker(queue, {"*": (handler := Obedient())})):
        await eventually(lambda: client.llen(f"bull:{queue.queue}:paused"), lambda length: length == 4)
        async with bull_peer(version, redis_url, queue.queue) as resumer:
            await resumer.call("resume")
            for name in (*names, late):
                await ended(queue, name)
    assert [run.id for run in handler.runs] == [*names, late]


@pytest.mark.spread("version")
async def test_pauses_merge_what_node_pushed_past_them(queue: BullStorage, peer: BullPeer) -> None:
    """Jobs that Node promotes in a paused queue outlive our pauses and resumes, which its own would not let them."""
    waiting = [await peer.add({}) for _ in range(2)]
    late = await peer.add({}, delay=60_000)
    await peer.call("pause")
    await peer.call("promote", late)
    assert (await peer.read(late))["state"] == "waiting"
    assert await queue.claim("ours", leases=LEASES, limit=5) == []
    await queue.pause()
    await queue.pause()
    counts = await peer.call("counts")
    assert (counts["wait"], counts["paused"]) == (0, 3)
    await queue.resume()
    await queue.resume()
    claims = await queue.claim("ours", leases=LEASES, limit=5)
    assert [claim.job_id for claim in claims] == [*waiting, late]


@pytest.mark.spread("version")
async def test_what_node_stranded_is_found_and_runs(queue: BullStorage, peer: BullPeer) -> None:
    """A job that Node's pause and resume have lost from every list is queued by a repair, once, and Node runs it."""
    waiting, late = await peer.add({}), await peer.add({}, delay=60_000)
    await peer.call("pause")
    await peer.call("promote", late)
    await peer.call("resume")
    assert (await peer.read(late))["state"] == "stuck"
    assert await queue.stranded() == [late]
    assert [(one.id, one.outcome) for one in await queue.repair()] == [(late, RepairOutcome.REQUEUED)]
    assert (await queue.stranded(), await queue.repair()) == ([], [])
    await peer.work(concurrency=1)
    await ended(queue, late)
    assert [run["id"] for run in await peer.runs()] == [waiting, late]


@pytest.mark.spread("version")
async def test_resuming_merges_what_node_pushed_past_a_pause(queue: BullStorage, peer: BullPeer) -> None:
    """Jobs that Node promoted in a paused queue are there after our `resume`, behind those that waited longer."""
    waiting = [await peer.add({}) for _ in range(2)]
    late = await peer.add({}, delay=60_000)
    await peer.call("pause")
    await peer.call("promote", late)
    await queue.resume()
    claims = await queue.claim("ours", leases=LEASES, limit=5)
    assert [claim.job_id for claim in claims] == [*waiting, late]


async def test_failures_are_retried_from_either_side(queue: BullStorage, peer: BullPeer, ids: Ids) -> None:
    """What failed here Node retries, and what failed in Node we retry: it runs, and completes."""
    theirs = await peer.add({"result": 1})
    await queue.settle([Failed(claim=await next_claim(queue), error=ERROR)])
    await peer.call("retry", theirs)
    claim = await next_claim(queue)
    assert claim.job_id == theirs
    await queue.settle([Completed(claim=claim, result=b"1")])
    assert (await peer.read(theirs))["state"] == "completed"

    ours = ids()
    await queue.enqueue([a_job(ours, {"failures": 1, "result": 2}, max_attempts=1)])
    await peer.work()
    await eventually(lambda: status(queue, ours), lambda found: found.state is JobState.FAILED)
    assert await unlocked(lambda: queue.retry([ours])) == 1
    assert (await ended(queue, ours)).result == b"2"
    assert [run["attemptsMade"] for run in await peer.runs(ours)] == [0, 1]


@pytest.mark.spread("version")
async def test_a_retry_from_here_is_one_more_attempt_as_in_node(queue: BullStorage, peer: BullPeer) -> None:
    """A job that has used up its attempts runs once more after our `retry`, and after Node's, and has failed again."""
    job_id = await peer.add({"failures": 9}, attempts=2)
    handler = Obedient()
    async with running(Worker(queue, {"*": handler}, options=WorkerOptions(retry=AT_ONCE))):
        for runs, retry in ((2, None), (3, lambda: queue.retry([job_id])), (4, lambda: peer.call("retry", job_id))):
            if retry is not None:
                await retry()
            await eventually(lambda: status(queue, job_id), partial(_has_failed, runs))
    assert [run.attempt for run in handler.of(job_id)] == [1, 2, 3, 4]


def _has_failed(runs: int, found: JobStatus) -> bool:
    return (found.state, found.attempt) == (JobState.FAILED, runs)


async def test_a_cancelled_job_is_a_failed_one_to_node(queue: BullStorage, peer: BullPeer, ids: Ids) -> None:
    """Node sees a failed job and may retry it, whether it waited or ran; then it was never cancelled."""
    ran, waited, left = names = [ids() for _ in range(3)]
    await queue.enqueue([a_job(name, {}, max_attempts=1) for name in names])
    claim = await next_claim(queue)
    assert claim.job_id == ran
    for name in names:
        await queue.cancel(name)
    await queue.settle([Cancelled(claim=claim)])
    for name in (ran, waited):
        assert (await peer.read(name))["state"] == "failed"
        await peer.call("retry", name)
        found = await status(queue, name)
        assert found.state is JobState.QUEUED
    assert (await queue.counts())[JobState.CANCELLED] == 1
    claims = [await next_claim(queue) for _ in range(2)]
    assert (await queue.renew(claims)).cancel_requested == set()
    await queue.settle([Failed(claim=again, error=ERROR) for again in claims])
    counts = await queue.counts()
    assert (counts[JobState.FAILED], counts[JobState.CANCELLED]) == (2, 1)
    assert [one.id for one in (await queue.list(JobState.CANCELLED)).jobs] == [left]


async def test_jobs_are_removed_from_either_side(queue: BullStorage, peer: BullPeer, ids: Ids) -> None:
    """What one removes is gone for the other, wherever it was; a running job is refused to both."""
    for details in ({}, {"delay": LATER}):
        job_id = ids()
        await queue.enqueue([a_job(job_id, {}, **details)])
        await peer.call("remove", job_id)
        assert await queue.status([job_id]) == [None]
    for opts in ({}, {"delay": 60_000}):
        job_id = await peer.add({}, **opts)
        assert await queue.remove([job_id]) == 1
        assert await peer.call("read", job_id) is None
    assert await queue.claim("ours", leases=LEASES, limit=5) == []

    running_here = await peer.add({})
    claim = await next_claim(queue)
    with pytest.raises(AssertionError, match="Could not get lock"):
        await peer.call("remove", running_here)
    await queue.settle([Completed(claim=claim, result=b"1")])
    running_there = await peer.add({"hold": True})
    await peer.work()
    await eventually(peer.runs, len)
    assert await queue.remove([running_there]) == 0
    await peer.call("release", running_there)
    await ended(queue, running_there)
    await peer.call("remove", running_here)
    assert await queue.remove([running_here, running_there]) == 1


async def test_ended_jobs_are_cleaned_from_either_side(queue: BullStorage, peer: BullPeer, ids: Ids) -> None:
    """Bull's `clean` takes our ended jobs, and ours takes those of Node."""
    ours, theirs = ids(), await peer.add({})
    await queue.settle([Completed(claim=await next_claim(queue), result=b"1")])
    assert await peer.call("clean", {"grace": -1_000, "state": "completed"}) == [theirs]
    assert await queue.status([theirs]) == [None]
    await queue.enqueue([a_job(ours, {})])
    await peer.work()
    await ended(queue, ours)
    await eventually(lambda: queue.clean(JobState.COMPLETED, older_than=timedelta(0)), lambda removed: removed == 1)
    assert await peer.call("read", ours) is None


async def test_records_last_as_in_nodes_version(queue: BullStorage, peer: BullPeer, version: str) -> None:
    """A job of Node's that wants to be removed is gone when it completes here, except where its Bull keeps it too."""
    job_id = await peer.add({}, removeOnComplete=True)
    await queue.settle([Completed(claim=await next_claim(queue), result=b"1")])
    found = await peer.call("read", job_id)
    assert (found and found["state"]) == ("completed" if version == "1.0.0" else None)


async def test_an_id_is_taken_once(queue: BullStorage, peer: BullPeer, version: str) -> None:
    """An id that Node's job has is a duplicate here, and one that ours has adds nothing in Node."""
    theirs = await peer.add({}, **({} if version == "1.0.0" else {"jobId": "order-7"}))
    [result] = await queue.enqueue([a_job(theirs, {"ours": 1})])
    assert result.status is EnqueueStatus.DUPLICATE
    assert json.loads((await next_claim(queue)).payload) == {}
    if version != "1.0.0":
        await queue.enqueue([a_job("order-8", {"ours": 1})])
        assert await peer.add({"theirs": 1}, jobId="order-8") == "order-8"
        assert json.loads((await next_claim(queue)).payload) == {"ours": 1}
    assert await queue.claim("ours", leases=LEASES, limit=5) == []
