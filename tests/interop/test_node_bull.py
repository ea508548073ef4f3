"""Node's Bull 1.x on the other side of one queue: what each adds, the other reads, runs and ends."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from itertools import pairwise

import pytest

from tests.interop.bull_jobs import Obedient
from tests.interop.bull_queue import ERROR, Ids, a_job, ended, status
from tests.interop.claims import next_claim
from tests.interop.peer import BullPeer
from tests.patience import eventually
from tests.workers.running import AT_ONCE, running
from workers import JobState, RetryPolicy, Worker, WorkerOptions
from workers.jobs import Completed, Failed, OutcomeKind, Retried, SettleStatus
from workers.storage.bull import BullJob, BullStorage


async def test_a_node_job_is_read(queue: BullStorage, peer: BullPeer) -> None:
    """Id, data, attempts and age of a job that Node added arrive in the claim, and it is completed for Node."""
    data = {"text": "häßlich 🙂", "list": [1, 2.5, None]}
    job_id = await peer.add(data, attempts=5)
    claim = await next_claim(queue)
    assert (claim.job_id, claim.attempt, claim.max_attempts) == (job_id, 1, 5)
    assert json.loads(claim.payload) == data
    assert (await peer.read(job_id))["state"] == "active"
    [outcome] = await queue.settle([Completed(claim=claim, result=b'{"done":["\xc3\xbc"]}')])
    assert outcome.status is SettleStatus.APPLIED
    found = await peer.read(job_id)
    assert (found["state"], found["returnvalue"], found["attemptsMade"]) == ("completed", {"done": ["ü"]}, 0)


async def test_its_queue_is_opened(queue: BullStorage, peer: BullPeer, redis_url: str) -> None:
    """Nothing that Bull 1 writes, of a job that waits and one that has ended, looks like a later version's."""
    ended_id = await peer.add({})
    await peer.work_once()
    await ended(queue, ended_id)
    await peer.add({}, delay=3_600_000)
    other = BullStorage(redis_url, queue.queue)
    await other.connect()
    await other.disconnect()


async def test_nodes_order_is_kept(queue: BullStorage, peer: BullPeer) -> None:
    """First come, first served, but for what Node adds as `lifo`; what is delayed comes when it is due."""
    late = await peer.add({}, delay=400)
    assert (await status(queue, late)).state is JobState.SCHEDULED
    first = await peer.add({})
    second = await peer.add({})
    urgent = await peer.add({}, lifo=True)
    assert [(await next_claim(queue)).job_id for _ in range(4)] == [urgent, first, second, late]


async def test_node_runs_our_jobs(queue: BullStorage, peer: BullPeer, ids: Ids) -> None:
    """Node reads data and attempts of our jobs, runs them in order and when they are due; we read its results."""
    late, first, second = a_job(ids(), {"result": 3}, delay=timedelta(seconds=3)), ids(), ids()
    waiting = [a_job(first, {"result": {"x": ["ü"]}}, max_attempts=4), a_job(second, {})]
    await queue.enqueue([late, *waiting])
    found = await peer.read(first)
    assert (found["state"], found["data"], found["attempts"]) == ("waiting", {"result": {"x": ["ü"]}}, 4)
    assert (await peer.read(late.id))["state"] == "delayed"
    await peer.work(concurrency=1)
    outcomes = [await ended(queue, job_id) for job_id in (first, second, late.id)]
    assert [json.loads(outcome.result or b"") for outcome in outcomes] == [{"x": ["ü"]}, None, 3]
    assert [run["id"] for run in await peer.runs()] == [first, second, late.id]
    assert (await status(queue, first)).state is JobState.COMPLETED


RESULTS = [None, 0, "", False, [], {}, True, "0", [None], {"ü": 1}]
NOTHING = [None, 0, "", False]
"""What Bull takes for no result, and reads as none."""


def as_bull_reads(result: object) -> object:
    return None if any(result is nothing for nothing in NOTHING) else result


@pytest.mark.spread("version")
async def test_our_results_read_in_node(queue: BullStorage, peer: BullPeer) -> None:
    """Node reads what our runs returned, and nothing where Bull has no way to tell it."""
    ids = [await peer.add({}) for _ in RESULTS]
    for result in RESULTS:
        await queue.settle([Completed(claim=await next_claim(queue), result=json.dumps(result).encode())])
    found = [await peer.read(job_id) for job_id in ids]
    assert {one["state"] for one in found} == {"completed"}
    assert [one["returnvalue"] for one in found] == [*map(as_bull_reads, RESULTS)]


@pytest.mark.spread("version")
async def test_nodes_results_read_here(queue: BullStorage, peer: BullPeer, ids: Ids) -> None:
    """We read what Node's runs returned, and `null` where Bull has no way to tell it."""
    jobs = [a_job(ids(), {"result": result}) for result in RESULTS]
    await queue.enqueue(jobs)
    await peer.work()
    outcomes = [await ended(queue, job.id) for job in jobs]
    assert [json.loads(outcome.result or b"") for outcome in outcomes] == [*map(as_bull_reads, RESULTS)]


@pytest.mark.spread("version")
async def test_progress_travels(queue: BullStorage, peer: BullPeer, ids: Ids) -> None:
    """Each reads the progress that the other's handler reported."""
    job_id = await peer.add({"progress": [3, 42]})
    with_node = ids()
    handler = Obedient()
    async with running(Worker(queue, {"*": handler})):
        await ended(queue, job_id)
    assert (await peer.read(job_id))["progress"] == 42
    await queue.enqueue([a_job(with_node, {"progress": [7, 30]})])
    await peer.work()
    await ended(queue, with_node)
    assert (await status(queue, with_node)).encoded_progress == b"30"


async def test_our_failures_read_in_node(queue: BullStorage, peer: BullPeer, version: str) -> None:
    """Reason, stacks and attempts of a job that failed here are where Node looks for them."""
    job_id = await peer.add({}, attempts=2)
    await queue.settle([Retried(claim=await next_claim(queue), delay=timedelta(0), error=ERROR)])
    assert (await peer.read(job_id))["state"] == "waiting"
    await queue.settle([Failed(claim=await next_claim(queue), error=ERROR)])
    found = await peer.read(job_id)
    assert (found["state"], found["attemptsMade"], found["stacktrace"]) == ("failed", 2, [ERROR.stack] * 2)
    if version != "1.0.0":
        assert found["failedReason"] == "no such server"


async def test_nodes_failures_read_here(queue: BullStorage, peer: BullPeer, ids: Ids) -> None:
    """A job of ours that failed in Node has failed here too, with its attempts and its last error."""
    job_id = ids()
    policy = RetryPolicy(initial=timedelta(milliseconds=30), multiplier=1, jitter=0)
    await queue.enqueue([a_job(job_id, {"failures": 9, "message": "boom"}, max_attempts=3, backoff=policy)])
    await peer.work()
    outcome = await ended(queue, job_id)
    assert outcome.error is not None
    assert outcome.kind is OutcomeKind.FAILED
    assert (outcome.error.type, outcome.error.message) == ("TypeError", "boom")
    assert "bull_peer.mjs" in outcome.error.stack
    assert ((await status(queue, job_id)).state, (await status(queue, job_id)).attempt) == (JobState.FAILED, 3)
    starts = [run["at"] for run in await peer.runs(job_id)]
    assert len(starts) == 3
    assert all(later - earlier >= 0.029 for earlier, later in pairwise(starts))  # Bull's timers may be 1 ms early


BACKOFFS = {"fixed": [0.1, 0.1, 0.1], "exponential": [0.1, 0.3, 0.7]}
"""What three failures are followed by, in seconds, with 100 ms."""


@pytest.mark.spread("version")
@pytest.mark.parametrize("kind", BACKOFFS)
async def test_backoff_goes_on_where_the_other_stopped(queue: BullStorage, peer: BullPeer, kind: str) -> None:
    """A job fails here, in Node and here again: each counts the other's attempts, and waits as Node was told to."""
    job_id = await peer.add({"failures": 3, "result": "at last"}, attempts=4, backoff={"type": kind, "delay": 100})
    starts = [await fail_one(queue)]
    await peer.work_once()
    [run] = await eventually(lambda: peer.runs(), lambda runs: runs)
    assert run["attemptsMade"] == 1
    starts += [run["at"], await fail_one(queue)]
    handler = Obedient()
    async with running(Worker(queue, {"*": handler})):
        assert (await ended(queue, job_id)).result == b'"at last"'
    starts += [one.at for one in handler.runs]
    assert [one.attempt for one in handler.runs] == [4]
    for (earlier, later), least in zip(pairwise(starts), BACKOFFS[kind], strict=True):
        assert later - earlier >= least - 0.001  # Bull's timers may be 1 ms early
    found = await peer.read(job_id)
    assert (found["state"], found["attemptsMade"], len(found["stacktrace"])) == ("completed", 3, 3)


async def fail_one(queue: BullStorage) -> float:
    """The next job has failed here and waits as it was added to; when its run began."""
    claim = await next_claim(queue)
    began = time.monotonic()
    assert claim.backoff is not None
    await queue.settle([Retried(claim=claim, delay=claim.backoff.delay(claim.attempt), error=ERROR)])
    return began


@pytest.mark.spread("version")
async def test_a_failure_without_backoff_runs_again_at_once(queue: BullStorage, peer: BullPeer) -> None:
    """A Node job with attempts and no back-off that fails here is ready again, and Node completes it."""
    job_id = await peer.add({"failures": 1, "result": 1}, attempts=2)
    await queue.settle([Retried(claim=await next_claim(queue), delay=timedelta(0), error=ERROR)])
    await peer.work()
    assert (await ended(queue, job_id)).result == b"1"
    assert [run["attemptsMade"] for run in await peer.runs(job_id)] == [1]


async def test_nodes_timeout_is_kept_here(queue: BullStorage, peer: BullPeer, version: str) -> None:
    """Each run here that takes longer than Node allows is a failed attempt, as it is in Node, which reads why."""
    job_id = await peer.add({"hold": True}, attempts=2, timeout=30)
    async with running(Worker(queue, {"*": (handler := Obedient())}, options=WorkerOptions(retry=AT_ONCE))):
        outcome = await ended(queue, job_id)
    assert outcome.error is not None
    assert (outcome.kind, outcome.error.type, outcome.error.exhausted) == (OutcomeKind.FAILED, "HandlerTimeout", True)
    assert [run.attempt for run in handler.of(job_id)] == [1, 2]
    found = await peer.read(job_id)
    assert (found["state"], found["attemptsMade"], len(found["stacktrace"])) == ("failed", 2, 2)
    if version != "1.0.0":
        assert found["failedReason"] == "operation timed out"


@pytest.mark.spread("version")
async def test_our_timeout_is_kept_in_node(queue: BullStorage, peer: BullPeer, ids: Ids) -> None:
    """A job of ours with a time limit fails in Node with the words that it fails with here, one in time completes."""
    slow, quick = ids(), ids()
    for job_id, data in ((slow, {"hold": True}), (quick, {"result": 1})):
        payload, timeout = json.dumps(data).encode(), timedelta(milliseconds=100 if job_id == slow else 60_000)
        await queue.enqueue([BullJob(id=job_id, name="ours", payload=payload, max_attempts=1, timeout=timeout)])
    await peer.work()
    outcome = await ended(queue, slow)
    assert outcome.error is not None
    assert (outcome.kind, outcome.error.message) == (OutcomeKind.FAILED, "operation timed out")
    assert (await ended(queue, quick)).result == b"1"


@pytest.mark.spread("version")
async def test_our_last_is_nodes_first(queue: BullStorage, peer: BullPeer, ids: Ids) -> None:
    """Node runs what we added as `lifo` before what waited already, the last of it first."""
    plain, first, second = (ids() for _ in range(3))
    await queue.enqueue([a_job(plain, {})])
    await queue.enqueue([BullJob(id=one, name="ours", payload=b"{}", lifo=True) for one in (first, second)])
    await peer.work(concurrency=1)
    await ended(queue, plain)
    assert [run["id"] for run in await peer.runs()] == [second, first, plain]
