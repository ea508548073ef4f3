"""What is special about the BullMQ storage; settling lies beside, every storage's promises in the conformance suite."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.workers.storage.bullmq.steps import ERROR, LEASES, SHORT
from workers import JobState, StorageError
from workers.errors import LossReason, StorageUnavailable, Unsupported
from workers.jobs import (
    DROP,
    Completed,
    Continued,
    EnqueueStatus,
    Failed,
    JobEventKind,
    OutcomeKind,
    Retried,
    SettleStatus,
)
from workers.storage.base import Subscription
from workers.storage.bullmq import BullMQStorage, inspect
from workers.storage.bullmq.jobs import REQUESTS_KEPT
from workers.storage.bullmq.listener import CANCEL_REQUESTED_EVENT
from workers.storage.on_redis.node_values import ERROR_FIELD
from workers.testing.steps import PATIENCE, claim_one, job, until

# Claiming what others wrote


async def test_a_job_without_a_record_can_be_got_rid_of(storage: BullMQStorage, client: Any) -> None:
    """An id in the list whose hash is gone is claimed without a name, and fails like any job."""
    await client.lpush(f"bull:{storage.queue}:wait", "ghost")
    claim = await claim_one(storage)
    assert (claim.job_id, claim.name, claim.payload, claim.max_attempts) == ("ghost", "", b"", 1)
    [outcome] = await storage.settle([Failed(claim=claim, error=ERROR)])
    assert outcome.status is SettleStatus.APPLIED


async def test_junk_in_a_record_is_survived(storage: BullMQStorage, client: Any) -> None:
    """Options and numbers that are none, and bytes that are no text, cost neither the job nor its neighbours."""
    raw = Redis.from_url(f"redis://127.0.0.1:{client.connection_pool.connection_kwargs['port']}/0")
    junk: dict[Any, Any] = {"name": b"\xff\xfe", "data": b"\x80{", "opts": "[[", "timestamp": "soon", "atm": "-1"}
    await raw.hset(f"bull:{storage.queue}:1", mapping=junk)
    await raw.aclose()
    await client.lpush(f"bull:{storage.queue}:wait", "1")
    await storage.enqueue([job("a")])
    bad, good = await storage.claim("w", leases=LEASES, limit=2)
    assert (bad.job_id, bad.payload, bad.attempt, bad.max_attempts) == ("1", b"\x80{", 1, 1)
    assert good.job_id == "a"
    outcomes = await storage.settle([Failed(claim=bad, error=ERROR), Completed(claim=good, result=b"1")])
    assert [outcome.status for outcome in outcomes] == [SettleStatus.APPLIED] * 2


async def test_leases_by_name(storage: BullMQStorage, client: Any) -> None:
    """Jobs are locked before their names are known; each has its own lease in the end."""
    await storage.enqueue([job("a", name="short"), job("b", name="long")])
    leases = {"short": timedelta(seconds=5), "long": timedelta(seconds=60)}
    claims = await storage.claim("w", leases=leases, limit=2)
    assert [claim.lease for claim in claims] == [timedelta(seconds=5), timedelta(seconds=60)]
    left = [await client.pttl(f"bull:{storage.queue}:{name}:lock") for name in "ab"]
    assert 0 < left[0] <= 5_000 < left[1] <= 60_000


async def test_a_job_an_operator_retried_runs(storage: BullMQStorage, client: Any) -> None:
    """A dashboard puts a failed job back without resetting its attempts: one more run, not a stalled job."""
    await storage.enqueue([job("a", max_attempts=1)])
    await storage.settle([Failed(claim=await claim_one(storage), error=ERROR)])
    key = f"bull:{storage.queue}"
    await client.zrem(f"{key}:failed", "a")
    await client.hset(f"{key}:a", "stc", 1)
    await client.lpush(f"{key}:wait", "a")
    claim = await claim_one(storage)
    assert (claim.attempt, claim.stalled) == (3, None)


async def test_a_node_failure_says_whether_it_was_the_last_attempt(storage: BullMQStorage, client: Any) -> None:
    """Node writes no more than a message; whether attempts were left is told from their number."""
    await storage.enqueue([job("spent", max_attempts=1), job("abandoned", max_attempts=2)])
    for claim in await storage.claim("w", leases=LEASES, limit=2):
        await storage.settle([Failed(claim=claim, error=ERROR)])
        await client.hdel(f"bull:{storage.queue}:{claim.job_id}", ERROR_FIELD)
    ends = [await storage.result(name) for name in ("spent", "abandoned")]
    assert [end and end.error and end.error.exhausted for end in ends] == [True, False]


async def test_a_limit_by_count_is_kept(storage: BullMQStorage, client: Any) -> None:
    """`removeOnComplete: 1` of another producer keeps one record when we complete its jobs."""
    await storage.enqueue([job(name) for name in ("a", "b", "c")])
    for name in ("a", "b", "c"):
        await client.hset(f"bull:{storage.queue}:{name}", "opts", json.dumps({"removeOnComplete": 1}))
    for _ in range(3):
        await storage.settle([Completed(claim=await claim_one(storage), result=b"1")])
    assert (await storage.counts())[JobState.COMPLETED] == 1


async def test_one_settlements_retention_spares_the_others(storage: BullMQStorage) -> None:
    """A record kept shorter than its queue's goes alone: not until the sweep, but then without the others."""
    await storage.enqueue([job("a"), job("b")])
    await storage.settle([Completed(claim=await claim_one(storage), result=b"1")])
    await storage.settle([Completed(claim=await claim_one(storage), result=b"1", keep=SHORT)])
    await until(lambda: _gone(storage, "b"))
    assert await storage.sweep(10) == 1
    assert (await storage.counts())[JobState.COMPLETED] == 1
    assert await storage.result("a") is not None


async def _gone(storage: BullMQStorage, job_id: str) -> bool:
    return await storage.status([job_id]) == [None]


async def test_a_continuation_that_cannot_be_spares_its_neighbours(storage: BullMQStorage) -> None:
    """What goes on in a way BullMQ cannot keep is an error of its own; the rest of the batch is settled."""
    await storage.enqueue([job("a"), job("b"), job("c")])
    first, second, third = await storage.claim("w", leases=LEASES, limit=3)
    outcomes = await storage.settle(
        [
            Completed(claim=first, result=b"1", then=job("next", ordering_key="k")),
            Completed(claim=second, result=b"2", then=job("other")),
            Continued(claim=third, then=job("c", ordering_key="k", chain_index=1)),
        ]
    )
    assert [outcome.status for outcome in outcomes] == [SettleStatus.ERROR, SettleStatus.APPLIED, SettleStatus.ERROR]
    assert all("ordering" in (outcomes[at].detail or "") for at in (0, 2))
    states = [status and status.state for status in await storage.status(["a", "b", "c", "next", "other"])]
    assert states == [JobState.PROCESSING, JobState.COMPLETED, JobState.PROCESSING, None, JobState.QUEUED]


async def test_a_job_somebody_moved_away_is_not_continued(storage: BullMQStorage, client: Any) -> None:
    """Not even in part, though its lock was left: it waits as it was."""
    await storage.enqueue([job("a", payload=b"1")])
    claim = await claim_one(storage)
    await client.rpoplpush(f"bull:{storage.queue}:active", f"bull:{storage.queue}:wait")
    [outcome] = await storage.settle([Continued(claim=claim, then=job("a", payload=b"2", chain_index=1))])
    assert (outcome.status, outcome.reason) == (SettleStatus.LOST, LossReason.TAKEN)
    again = await claim_one(storage)
    assert (again.payload, again.chain_index) == (b"1", 0)


async def test_the_next_link_stays_what_it_is_to_node(storage: BullMQStorage, client: Any) -> None:
    """A child of a flow goes on as one: what Node keeps with it is not touched."""
    await storage.enqueue([job("a")])
    key, parent = f"bull:{storage.queue}:a", f"bull:{storage.queue}:parent"
    await client.hset(key, "parentKey", parent)
    await client.rpush(f"{key}:logs", "a line")
    await storage.settle([Continued(claim=await claim_one(storage), then=job("a", chain_index=1))])
    assert await client.hget(key, "parentKey") == parent
    assert await client.lrange(f"{key}:logs", 0, -1) == ["a line"]


async def test_a_job_may_begin_as_a_later_link(storage: BullMQStorage) -> None:
    """As when it is copied from another queue."""
    await storage.enqueue([job("a", chain_index=3)])
    assert (await claim_one(storage)).chain_index == 3


async def test_a_page_looks_at_a_bounded_number(storage: BullMQStorage, client: Any) -> None:
    """Jobs in another state that share a structure end a page early, with a cursor, and hide nothing."""
    await storage.enqueue([job("failing")])
    await storage.settle([Retried(claim=await claim_one(storage), delay=timedelta(hours=9), error=ERROR)])
    await storage.enqueue([job(f"job-{number}", delay=timedelta(hours=1)) for number in range(1_500)])
    first = await storage.list(JobState.FAILING, limit=1)
    assert (first.jobs, first.cursor is None) == ((), False)
    second = await storage.list(JobState.FAILING, cursor=first.cursor, limit=1)
    assert ([one.id for one in second.jobs], second.cursor) == (["failing"], None)


async def test_failing_and_scheduled_jobs_are_told_apart_in_steps(
    storage: BullMQStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each delayed job is counted once, however many steps it takes to look at them."""
    monkeypatch.setattr(inspect, "PAGE", 1)
    await storage.enqueue([job(f"failing-{number}") for number in range(13)])
    claims = await storage.claim("w", leases=LEASES, limit=13)
    await storage.settle([Retried(claim=claim, delay=timedelta(hours=1), error=ERROR) for claim in claims])
    await storage.enqueue([job(f"later-{number}", delay=timedelta(hours=1)) for number in range(12)])
    counts = await storage.counts()
    assert (counts[JobState.FAILING], counts[JobState.SCHEDULED]) == (13, 12)


async def test_a_sweep_ends_with_jobs_it_may_not_touch(storage: BullMQStorage, client: Any) -> None:
    """Records without a hash or with a lock left behind go, and nothing keeps a sweep going round."""
    await storage.enqueue([job("a", keep_completed=timedelta(milliseconds=1))])
    await storage.settle([Completed(claim=await claim_one(storage), result=b"1")])
    await client.set(f"bull:{storage.queue}:a:lock", "left behind")
    await client.zadd(f"bull:{storage.queue}:failed", {"ghost": 1})
    await until(lambda: _gone(storage, "a"))
    assert await storage.sweep(1_000) == 2
    assert await storage.sweep(1_000) == 0
    assert set((await storage.counts()).values()) == {0}


async def test_a_number_is_found_under_either_id(storage: BullMQStorage, client: Any) -> None:
    """`7` of ours and `7` of BullMQ's counter are told apart in Redis; ours is looked for first."""
    await client.hset(f"bull:{storage.queue}:7", mapping={"name": "theirs", "data": "{}", "timestamp": 1})
    await client.lpush(f"bull:{storage.queue}:wait", "7")
    [theirs] = await storage.status(["7"])
    await storage.enqueue([job("7", name="ours")])
    [ours] = await storage.status(["7"])
    assert theirs is not None
    assert ours is not None
    assert (theirs.name, ours.name) == ("theirs", "ours")
    claims = await storage.claim("w", leases=LEASES, limit=2)
    assert [(claim.job_id, claim.name) for claim in claims] == [("7", "theirs"), ("7", "ours")]
    outcomes = await storage.settle([Completed(claim=claim, result=b"1") for claim in claims])
    assert [outcome.status for outcome in outcomes] == [SettleStatus.APPLIED] * 2


async def test_ordering_keys_and_ttl_updates_are_refused(storage: BullMQStorage) -> None:
    """What the capabilities declare away is refused, not ignored."""
    with pytest.raises(Unsupported, match="ordering"):
        await storage.enqueue([job("a", ordering_key="k")])
    with pytest.raises(Unsupported):
        await storage.update_result_ttl("a", timedelta(hours=1))


async def test_a_job_of_a_scheduler_is_not_ended(storage: BullMQStorage, client: Any) -> None:
    """Finish one run of a Node job scheduler would end the schedule; the error says what to do."""
    await storage.enqueue([job("a")])
    await client.hset(f"bull:{storage.queue}:a", "rjk", "every-minute")
    with pytest.raises(StorageError, match="scheduler"):
        await storage.cancel("a")
    with pytest.raises(StorageError, match="scheduler"):
        await storage.complete("a", b"1")
    assert await storage.remove(["a"], running=True) == 0


async def test_a_parent_is_not_completed_before_its_children(storage: BullMQStorage, client: Any) -> None:
    """A job that waits for others in a Node flow is left to them; the error says so."""
    await storage.enqueue([job("a")])
    await client.lrem(f"bull:{storage.queue}:wait", 0, "a")
    await client.zadd(f"bull:{storage.queue}:waiting-children", {"a": 1})
    with pytest.raises(StorageError, match="children"):
        await storage.complete("a", b"1")
    assert await storage.result("a") is None


# Events and cancelling


async def test_a_scheduled_job_is_not_failing(storage: BullMQStorage) -> None:
    """BullMQ's `delayed` event means two things; only a retry is a failure."""
    async with storage.events() as events, asyncio.timeout(PATIENCE):
        await storage.enqueue([job("a", delay=timedelta(milliseconds=20))])
        await storage.wait(("*",), timeout=timedelta(seconds=5))
        claim = await claim_one(storage)
        await storage.settle([Retried(claim=claim, delay=timedelta(hours=1), error=ERROR)])
        await storage.cancel("a")
        kinds = [(await events.get()).kind for _ in range(4)]
    expected = [JobEventKind.QUEUED, JobEventKind.ACTIVE, JobEventKind.FAILING, JobEventKind.CANCELLED]
    assert kinds == expected


async def test_a_trimmed_stream_of_cancel_requests_is_told(storage: BullMQStorage, client: Any) -> None:
    """A worker learns that it may have missed requests when more were made in one step than the stream keeps."""
    async with storage.cancel_requests() as requests, asyncio.timeout(PATIENCE):
        many = client.pipeline(transaction=True)
        for number in range(REQUESTS_KEPT + 200):
            event = {"event": CANCEL_REQUESTED_EVENT, "jobId": f"job-{number}"}
            many.xadd(storage._cancels._stream, event, maxlen=REQUESTS_KEPT)
        await many.execute()
        with pytest.raises(StorageUnavailable, match="the stream keeps"):
            await _read_on(requests)


async def _read_on(requests: Subscription) -> None:
    while True:
        await requests.get()


async def test_a_cancel_ends_with_a_new_generation(storage: BullMQStorage) -> None:
    """A cancelled id that was enqueued again is a job like any other."""
    await storage.enqueue([job("a")])
    await storage.cancel("a")
    outcome = await storage.result("a")
    assert outcome is not None
    assert outcome.kind is OutcomeKind.CANCELLED
    assert [result.status for result in await storage.enqueue([job("a")])] == [EnqueueStatus.QUEUED]
    await storage.settle([Completed(claim=await claim_one(storage), result=b"1", keep=DROP)])
    assert await storage.result("a") is None


async def test_a_claim_of_another_id_is_another_job(storage: BullMQStorage) -> None:
    """The id that a claim shows is the job it speaks of."""
    await storage.enqueue([job("a"), job("b")])
    claim = await claim_one(storage)
    [outcome] = await storage.settle([Completed(claim=replace(claim, job_id="b"), result=b"1")])
    assert outcome.status is SettleStatus.LOST


async def test_worker_records_expire(storage: BullMQStorage, client: Any) -> None:
    """It goes with the sweep an hour later."""
    await storage.claim("w", leases=LEASES, limit=1)
    seen = f"bull:{storage.queue}:workers:seen"
    assert await client.zincrby(seen, -3_600_001, "w") > 0
    assert await storage.workers() == []
    assert await storage.sweep(10) == 1
    assert not await client.exists(seen)
