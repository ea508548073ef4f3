"""The options of jobs on a Bull queue: Node's are kept here, ours are Node's where it has a word for them."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from tests.workers.running import AT_ONCE, done, forever, outcome, running
from tests.workers.storage.bull.steps import ERROR, NodeBull
from workers import WorkerOptions, retry
from workers.jobs import DROP, Completed, Continued, OutcomeKind, Retried
from workers.retry import RetryPolicy
from workers.storage.bull import BullJob, BullStorage
from workers.storage.on_redis.node_values import from_ms
from workers.testing.steps import HOUR, claim_one, continued, job, released, retried, settle
from workers.worker import Worker


async def test_a_job_of_node_may_be_last_in_first_out(storage: BullStorage, node: NodeBull) -> None:
    """Retried at once, it is the next to run."""
    await node.add(opts='{"lifo":true,"attempts":3}', attempts=3)
    held = await claim_one(storage)
    await node.add()
    await storage.settle([Retried(claim=held, delay=timedelta(0), error=ERROR)])
    assert (await node.line("wait"))[0] == held.job_id


@pytest.mark.parametrize(
    ("backoff", "delays"),
    [
        (500, [500, 500, 500]),
        ({"type": "fixed", "delay": 70}, [70, 70, 70]),
        ({"type": "exponential", "delay": 50}, [50, 150, 350]),
        ({"type": "exponential", "delay": "50"}, [50, 150, 350]),
    ],
    ids=["number", "fixed", "exponential", "text"],
)
async def test_nodes_backoff_is_kept(backoff: object, delays: list[int], storage: BullStorage, node: NodeBull) -> None:
    """The wait after the n-th failed run is Bull's: a number, or `(2^n - 1)` times the delay."""
    await node.add(attempts=9, opts=json.dumps({"attempts": 9, "backoff": backoff}))
    for made, delay in enumerate(delays):
        held = await claim_one(storage)
        assert (held.attempt, held.max_attempts, held.name) == (made + 1, 9, "default")
        assert held.backoff is not None
        assert held.backoff.delay(held.attempt) == timedelta(milliseconds=delay)
        await storage.settle([Retried(claim=held, delay=timedelta(0), error=ERROR)])


@pytest.mark.parametrize("backoff", ["null", '"x"', "{}", '{"type":"custom","delay":1}', "-5"])
async def test_a_backoff_nobody_knows_is_at_once(backoff: str, storage: BullStorage, node: NodeBull) -> None:
    """None, junk, and a kind that Bull 1.x has not, mean a retry at once, as in Node."""
    await node.add(opts=f'{{"backoff":{backoff}}}')
    assert (await claim_one(storage)).backoff == retry.AT_ONCE


async def test_a_job_of_ours_leaves_the_backoff_to_the_worker(storage: BullStorage) -> None:
    """A job that we enqueued without a back-off waits by the handler's or worker's policy, not at once."""
    await storage.enqueue([job("ours")])
    assert (await claim_one(storage)).backoff is None


async def test_a_policy_of_ours_survives_the_way_through_redis(storage: BullStorage, node: NodeBull) -> None:
    """Node finds the nearest of its kinds, we find our own."""
    policy = RetryPolicy(initial=timedelta(seconds=5), multiplier=3, maximum=timedelta(minutes=9), jitter=0.25)
    await storage.enqueue([job("ours", backoff=policy)])
    assert json.loads((await node.record("ours"))["opts"])["backoff"] == {"type": "exponential", "delay": 5_000}
    assert (await claim_one(storage)).backoff == policy


async def test_remove_on_complete_leaves_nothing(storage: BullStorage, node: NodeBull) -> None:
    """A job of Node's that wants to be removed, and one of ours that is dropped, are gone; Node sees ours so too."""
    await node.add("theirs", opts='{"removeOnComplete":true}')
    await storage.enqueue([job("ours", keep_completed=DROP)])
    assert json.loads((await node.record("ours"))["opts"])["removeOnComplete"] is True
    for claim in await storage.claim("w", leases={"*": HOUR}, limit=2):
        await storage.settle([Completed(claim=claim, result=b"1")])
    assert await node.client.exists(node.key("theirs"), node.key("ours"), node.key("completed")) == 0


async def test_older_versions_do_not_remove_on_complete(old: BullStorage, node: NodeBull) -> None:
    """Bull 1.0 ignores the option: its records stay, however the job ends here, and ours are dropped all the same."""
    theirs = [await node.add(opts='{"removeOnComplete":true}') for _ in range(2)]
    await old.enqueue([job(ours := await old.next_id(), keep_completed=DROP)])
    await old.complete(theirs[0], b"1")
    for claim in await old.claim("w", leases={"*": HOUR}, limit=2):
        await old.settle([Completed(claim=claim, result=b"1")])
    assert await node.client.smembers(node.key("completed")) == set(theirs)
    assert await node.client.exists(*map(node.key, [*theirs, ours])) == 2


def bull_job(job_id: str, **details: Any) -> BullJob:
    return BullJob(**{"id": job_id, "name": "work", "payload": b"{}", **details})


@pytest.mark.parametrize(
    ("timeout", "milliseconds"),
    [("500", 500), ('"500"', 500), ("0.5", 1), ("1e-9", 1), ("1e15", 1e15)],
    ids=["number", "text", "less-than-one", "hardly-more-than-none", "beyond-the-end-of-time"],
)
async def test_nodes_timeout_is_kept(timeout: str, milliseconds: float, storage: BullStorage, node: NodeBull) -> None:
    """Every attempt is claimed with it, in whole milliseconds at least."""
    await node.add(opts=f'{{"attempts":2,"timeout":{timeout}}}', attempts=2)
    for _ in range(2):
        held = await claim_one(storage)
        assert held.timeout == from_ms(milliseconds)
        await storage.settle([Retried(claim=held, delay=timedelta(0), error=ERROR)])


@pytest.mark.parametrize("timeout", ["null", "0", "-5", "NaN", "Infinity", "1e400", '"x"', '"NaN"', "[]", "{}", "true"])
async def test_a_timeout_that_is_none_bounds_nothing(timeout: str, storage: BullStorage, node: NodeBull) -> None:
    """Junk reads as if it were not there, and the job runs."""
    await node.add("odd", opts=f'{{"timeout":{timeout}}}')
    async with running(Worker(storage, {"*": done})):
        assert (await outcome(storage, "odd")).kind is OutcomeKind.COMPLETED


async def test_a_run_that_takes_longer_than_node_allows_fails(storage: BullStorage, node: NodeBull) -> None:
    """It is an attempt like any other that fails, with the words of Bull's own workers."""
    await node.add("slow", opts='{"attempts":2,"timeout":20}', attempts=2)
    async with running(Worker(storage, {"*": forever}, options=WorkerOptions(retry=AT_ONCE))):
        ended = await outcome(storage, "slow")
    assert ended.error is not None
    assert (ended.error.type, ended.error.message) == ("HandlerTimeout", "operation timed out")
    assert ended.error.exhausted
    record = await node.record("slow")
    assert (record["failedReason"], record["attemptsMade"]) == ("operation timed out", "2")
    assert len(json.loads(record["stacktrace"])) == 2


async def test_our_jobs_may_have_a_timeout(storage: BullStorage, node: NodeBull) -> None:
    """It is where Node looks for it, and in our own claims; what follows in a chain has its own."""
    await storage.enqueue([bull_job("bounded", timeout=timedelta(seconds=1.5)), job("unbounded")])
    assert json.loads((await node.record("bounded"))["opts"])["timeout"] == 1_500
    assert "timeout" not in json.loads((await node.record("unbounded"))["opts"])
    bounded, unbounded = await storage.claim("w", leases={"*": HOUR}, limit=2)
    assert (bounded.timeout, unbounded.timeout) == (timedelta(seconds=1.5), None)
    following = bull_job("bounded", timeout=timedelta(seconds=2))
    await storage.settle([Continued(claim=bounded, then=following), Continued(claim=unbounded, then=job("unbounded"))])
    bounded, unbounded = await storage.claim("w", leases={"*": HOUR}, limit=2)
    assert (bounded.timeout, unbounded.timeout) == (timedelta(seconds=2), None)


async def test_a_timeout_of_less_than_a_millisecond_is_not_none(storage: BullStorage, node: NodeBull) -> None:
    """Bull takes 0 for no timeout."""
    await storage.enqueue([bull_job("hardly", timeout=timedelta(microseconds=1))])
    assert json.loads((await node.record("hardly"))["opts"])["timeout"] == 1


@pytest.mark.parametrize("timeout", [timedelta(0), timedelta(-1), timedelta(days=24, microseconds=1)], ids=str)
def test_a_timeout_that_node_cannot_keep_is_refused(timeout: timedelta) -> None:
    """One that is none, and one that Node's timers take for none."""
    with pytest.raises(ValueError, match="job 'x': a timeout is above 0 and up to 24 days"):
        bull_job("x", timeout=timeout)


async def test_our_jobs_may_be_last_in_first_out(storage: BullStorage, node: NodeBull) -> None:
    """The last of them runs next, one that is delayed stands behind as it becomes due; Node is told so too."""
    await storage.enqueue([job("plain"), bull_job("first", lifo=True), bull_job("second", lifo=True)])
    await storage.enqueue([bull_job("third", lifo=True), bull_job("late", lifo=True, delay=timedelta(milliseconds=1))])
    assert await node.line("wait") == ["third", "second", "first", "plain"]
    assert json.loads((await node.record("first"))["opts"])["lifo"] is True
    held = await claim_one(storage)
    await storage.settle([Retried(claim=held, delay=timedelta(0), error=ERROR)])
    assert (await node.line("wait"))[0] == "third"


async def test_unknown_options_stay(storage: BullStorage, node: NodeBull, client: Any) -> None:
    """What Node's options say beside what we know is there after each change, and in the next link of a chain."""
    unknown = {"ofVersionNine": {"a": [1]}, "priority": 3}
    job_id = await node.add(attempts=9, opts=json.dumps({"attempts": 9, **unknown}))

    async def options() -> dict[str, object]:
        found: dict[str, object] = json.loads(await client.hget(f"bull:{storage.queue}:{job_id}", "opts"))
        return found

    await settle(storage, retried(await claim_one(storage)))
    await settle(storage, released(await claim_one(storage)))
    assert await options() == {"attempts": 9, **unknown}
    await settle(storage, continued(await claim_one(storage)))
    after = await options()
    assert {name: after[name] for name in unknown} == unknown
    assert "workers" in after
