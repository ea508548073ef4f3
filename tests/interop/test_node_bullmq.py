"""Node BullMQ on the other side of one queue: what each writes, the other reads and honours."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from itertools import pairwise

import pytest

from tests.interop.claims import LEASES, next_claim
from tests.interop.peer import NodePeer
from tests.patience import PATIENCE_SECONDS
from workers import JobState, RetryPolicy, Worker
from workers.jobs import (
    DROP,
    TERMINAL_EVENTS,
    Cancelled,
    Completed,
    Continued,
    ErrorInfo,
    Failed,
    NewJob,
    OutcomeKind,
    Retried,
    SettleStatus,
)
from workers.retry import AT_ONCE
from workers.storage.bullmq import BullMQStorage
from workers.storage.on_redis.node_values import FOREVER
from workers.worker.handlers import Job

HOUR = timedelta(hours=1)


pytestmark = pytest.mark.spread("package")


async def work_until_ended(storage: BullMQStorage, handler: Callable[[Job], Awaitable[object]], job_id: str) -> None:
    """Our worker ran until the job had ended for good."""
    worker = Worker(storage, {"*": handler}, concurrency=5)
    async with asyncio.timeout(PATIENCE_SECONDS), storage.subscribe(job_id) as events:
        running = asyncio.create_task(worker.run())
        while (await events.get()).kind not in TERMINAL_EVENTS:
            pass
        worker.stop()
        await running


async def test_options_of_a_node_job_are_read(storage: BullMQStorage, node: NodePeer) -> None:
    """Name, data, id, attempts, back-off, retention and priority of an npm producer arrive in the claim."""
    options = {
        "jobId": "order-7",
        "attempts": 5,
        "backoff": {"type": "exponential", "delay": 5000},
        "removeOnComplete": {"age": 86400},
        "removeOnFail": True,
        "priority": 3,
    }
    data = {"text": "häßlich 🙂", "list": [1, 2.5, None]}
    assert await node.add({"name": "deliver", "data": data, "opts": options}) == ["order-7"]
    claim = await next_claim(storage)
    assert (claim.job_id, claim.name, claim.attempt, claim.max_attempts) == ("order-7", "deliver", 1, 5)
    assert claim.payload == '{"text":"häßlich 🙂","list":[1,2.5,null]}'.encode()
    assert claim.backoff == RetryPolicy(initial=timedelta(seconds=5), multiplier=2.0, maximum=FOREVER, jitter=0.0)
    assert (claim.keep_completed, claim.keep_failed, claim.priority) == (timedelta(days=1), DROP, 3)


async def test_defaults_of_a_node_job(storage: BullMQStorage, node: NodePeer) -> None:
    """A Node job without options has a number for an id, one attempt, a back-off of nothing, and is kept."""
    [job_id] = await node.add({"name": "plain", "data": {}})
    claim = await next_claim(storage)
    assert (claim.job_id, claim.max_attempts, claim.backoff) == (job_id, 1, AT_ONCE)
    assert job_id.isdigit()
    assert (claim.keep_completed, claim.keep_failed) == (FOREVER, FOREVER)
    [outcome] = await storage.settle([Completed(claim=claim, result=b'{"done":true}')])
    assert outcome.status is SettleStatus.APPLIED
    found = await node.read(job_id)
    assert (found["state"], found["returnvalue"], found["attemptsMade"]) == ("completed", {"done": True}, 1)
    [status] = await storage.status([job_id])
    assert status is not None
    assert status.state is JobState.COMPLETED


async def test_a_delayed_node_job_wakes_our_wait(storage: BullMQStorage, node: NodePeer) -> None:
    """A job an npm producer delayed is scheduled, then claimed by a worker that waited for it."""
    await node.add({"name": "later", "data": {}, "opts": {"delay": 300, "jobId": "later"}})
    [status] = await storage.status(["later"])
    assert status is not None
    assert status.state is JobState.SCHEDULED
    assert (await next_claim(storage)).job_id == "later"


async def test_our_failures_read_in_node(storage: BullMQStorage, node: NodePeer) -> None:
    """Reason, stack and attempts of a job that failed here are where Node looks for them."""
    await node.add({"name": "bad", "data": {}, "opts": {"jobId": "bad", "attempts": 2}})
    error = ErrorInfo(type="ValueError", message="no such server", stack="Traceback\nValueError: no such server")
    await storage.settle([Retried(claim=await next_claim(storage), delay=timedelta(0), error=error)])
    await storage.settle([Failed(claim=await next_claim(storage), error=error)])
    found = await node.read("bad")
    assert (found["state"], found["failedReason"], found["attemptsMade"]) == ("failed", "no such server", 2)
    assert found["stacktrace"] == ["Traceback\nValueError: no such server"] * 2


async def test_our_worker_keeps_a_node_jobs_backoff(storage: BullMQStorage, node: NodePeer) -> None:
    """The attempts and delays an npm producer asked for are what our worker does."""
    options = {"jobId": "flaky", "attempts": 3, "backoff": {"type": "exponential", "delay": 60}}
    await node.add({"name": "flaky", "data": {"n": 1}, "opts": options})
    starts: list[float] = []

    async def fail(job: Job) -> object:
        starts.append(asyncio.get_running_loop().time())
        raise RuntimeError(f"attempt {job.attempt}")

    await work_until_ended(storage, fail, "flaky")
    gaps = [later - earlier for earlier, later in pairwise(starts)]
    assert len(starts) == 3
    assert gaps[0] >= 0.06
    assert gaps[1] >= 0.12
    found = await node.read("flaky")
    assert (found["state"], found["failedReason"], found["attemptsMade"]) == ("failed", "attempt 3", 3)


async def test_node_works_our_jobs(storage: BullMQStorage, node: NodePeer) -> None:
    """An npm worker reads our jobs' options and data, and we read its result."""
    jobs = [
        NewJob(id="a:1/ü", name="n", payload=b'{"result":{"x":[1]}}', priority=2, max_attempts=4, keep_completed=HOUR),
        NewJob(id="void", name="n", payload=b"{}"),
        NewJob(id="soon", name="n", payload=b'{"result":3}', priority=3, delay=timedelta(milliseconds=200)),
    ]
    await storage.enqueue(jobs)
    found = await node.read("~YToxL8O8")
    assert found["opts"] == {
        "workers": 1,
        "attempts": 4,
        "jobId": "~YToxL8O8",
        "priority": 2,
        "removeOnComplete": {"age": 3600},
        "removeOnFail": {"age": 604800},
    }
    runs = await node.work(3)
    assert [run["id"] for run in runs] == ["void", "~YToxL8O8", "soon"]
    outcomes = [await storage.result(job.id) for job in jobs]
    assert [outcome.result for outcome in outcomes if outcome] == [b'{"x":[1]}', b"null", b"3"]


async def test_node_keeps_our_backoff_and_failures(storage: BullMQStorage, node: NodePeer) -> None:
    """An npm worker repeats our job as it asks for, and we read the failure it ended with."""
    policy = RetryPolicy(initial=timedelta(milliseconds=50), multiplier=2, jitter=0)
    payload = b'{"failures":9,"message":"boom"}'
    await storage.enqueue([NewJob(id="doomed", name="n", payload=payload, max_attempts=3, backoff=policy)])
    runs = await node.work(1)
    assert [run["attemptsMade"] for run in runs] == [0, 1, 2]
    assert runs[1]["at"] - runs[0]["at"] >= 50
    assert runs[2]["at"] - runs[1]["at"] >= 100
    outcome = await storage.result("doomed")
    assert outcome is not None
    assert outcome.error is not None
    assert (outcome.kind, outcome.error.type, outcome.error.message) == (OutcomeKind.FAILED, "TypeError", "boom")
    assert outcome.error.exhausted
    assert "peer.mjs" in outcome.error.stack
    [status] = await storage.status(["doomed"])
    assert status is not None
    assert (status.attempt, status.state) == (3, JobState.FAILED)


async def test_an_unrecoverable_node_failure_ends_our_job(storage: BullMQStorage, node: NodePeer) -> None:
    """Node's `UnrecoverableError` fails our job at its first attempt, and the id can be enqueued again."""
    job = NewJob(id="hopeless", name="n", payload=b'{"unrecoverable":"never"}', max_attempts=5)
    await storage.enqueue([job])
    assert len(await node.work(1)) == 1
    [status] = await storage.status(["hopeless"])
    assert status is not None
    assert status.last_error is not None
    assert (status.attempt, status.last_error.message, status.last_error.exhausted) == (1, "never", False)
    await storage.enqueue([job])
    assert (await next_claim(storage)).attempt == 1


async def test_attempts_are_counted_across_both(storage: BullMQStorage, node: NodePeer) -> None:
    """An attempt that failed here counts for the npm worker that takes the next."""
    await storage.enqueue([NewJob(id="shared", name="n", payload=b'{"failures":1,"result":"ok"}', max_attempts=2)])
    error = ErrorInfo(type="ValueError", message="ours")
    await storage.settle([Retried(claim=await next_claim(storage), delay=timedelta(0), error=error)])
    [run] = await node.work(1)
    assert run["attemptsMade"] == 1
    outcome = await storage.result("shared")
    assert outcome is not None
    assert outcome.result == b'"ok"'


async def test_node_works_the_next_link_of_our_chain(storage: BullMQStorage, node: NodePeer) -> None:
    """A job that failed once here and went on is, to an npm worker, a fresh job of the new name, data and options."""
    await storage.enqueue([NewJob(id="chain", name="first", payload=b"{}", max_attempts=2, priority=3)])
    error = ErrorInfo(type="ValueError", message="ours")
    await storage.settle([Retried(claim=await next_claim(storage), delay=timedelta(0), error=error)])
    claim = await next_claim(storage)
    payload = b'{"failures":1,"message":"theirs","result":{"\xc3\xbc":1}}'
    then = NewJob(id="chain", name="second", payload=payload, max_attempts=2, keep_completed=HOUR, chain_index=1)
    [outcome] = await storage.settle([Continued(claim=claim, then=then)])
    assert outcome.status is SettleStatus.APPLIED

    found = await node.read("chain")
    assert (found["name"], found["attemptsMade"], found["priority"]) == ("second", 0, 0)
    assert found["data"] == {"failures": 1, "message": "theirs", "result": {"ü": 1}}
    assert found.get("failedReason") is None
    assert (found["opts"]["attempts"], found["opts"]["removeOnComplete"]) == (2, {"age": 3600})
    runs = await node.work(1)
    assert [(run["name"], run["attemptsMade"]) for run in runs] == [("second", 0), ("second", 1)]
    ended = await storage.result("chain")
    assert ended is not None
    assert (ended.kind, ended.result) == (OutcomeKind.COMPLETED, '{"ü":1}'.encode())
    [status] = await storage.status(["chain"])
    assert status is not None
    assert (status.chain_index, status.attempt, status.created_at) == (1, 2, claim.created_at)


async def test_a_node_job_is_completed_from_outside(storage: BullMQStorage, node: NodePeer) -> None:
    """A job an npm producer delayed or prioritised is, once completed here, an ordinary completed one to Node."""
    options = ({"jobId": "late", "delay": 60_000}, {"jobId": "urgent", "priority": 1})
    await node.add(*({"name": "wanted", "data": {}, "opts": one} for one in options))
    for job_id, was in (("late", JobState.SCHEDULED), ("urgent", JobState.QUEUED)):
        assert await storage.complete(job_id, b'{"by":"hand"}') is was
        found = await node.read(job_id)
        assert (found["state"], found["returnvalue"], found["attemptsMade"]) == ("completed", {"by": "hand"}, 0)
    assert await storage.claim("ours", leases=LEASES, limit=5) == []


async def test_a_cancelled_job_is_a_failed_one_to_node(storage: BullMQStorage, node: NodePeer) -> None:
    """Node sees why it did not run and may retry it, whether it waited or ran; then it was never cancelled."""
    await storage.enqueue([NewJob(id=name, name="work", payload=b"{}") for name in ("ran", "waited", "left")])
    ran = await next_claim(storage)
    for job_id in ("ran", "waited", "left"):
        await storage.cancel(job_id)
    await storage.settle([Cancelled(claim=ran)])
    for job_id in ("ran", "waited"):
        found = await node.read(job_id)
        assert (found["state"], found["failedReason"]) == ("failed", f"job '{job_id}' was cancelled")
        await node.call("retry", job_id)
    assert [one.state if one else None for one in await storage.status(["ran", "waited"])] == [JobState.QUEUED] * 2
    assert (await storage.counts())[JobState.CANCELLED] == 1
    claims = [await next_claim(storage) for _ in range(2)]
    assert (await storage.renew(claims)).cancel_requested == set()
    await storage.settle([Failed(claim=claim, error=ErrorInfo(type="ValueError", message="no")) for claim in claims])
    counts = await storage.counts()
    assert (counts[JobState.FAILED], counts[JobState.CANCELLED]) == (2, 1)
    assert [one.id for one in (await storage.list(JobState.CANCELLED)).jobs] == ["left"]
