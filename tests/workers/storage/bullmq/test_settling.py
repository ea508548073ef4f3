"""Settling on BullMQ: every code of the scripts, made by the state that causes it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.workers.storage.bullmq.steps import ERROR, LEASES
from workers import StorageError
from workers.errors import LossReason, StorageUnavailable
from workers.jobs import (
    Cancelled,
    Claim,
    Completed,
    Continued,
    Failed,
    JobEventKind,
    JobState,
    Released,
    Retried,
    Settlement,
    SettleStatus,
)
from workers.storage.bullmq import BullMQStorage
from workers.storage.bullmq.claims import JOBS_A_SCRIPT
from workers.storage.bullmq.ends import code_outcome
from workers.testing.steps import claim_one, expect, job, snoozed


async def _removed(storage: BullMQStorage, client: Any, key: str) -> None:
    await client.delete(key, f"{key}:lock")


async def _recovered(storage: BullMQStorage, client: Any, key: str) -> None:
    await client.delete(f"{key}:lock")
    passes = [await storage.recover(10) for _ in range(storage.capabilities.recovery_passes)]
    assert [recovery.requeued for recovery in passes] == [(), (key.rpartition(":")[2],)]


async def _taken(storage: BullMQStorage, client: Any, key: str) -> None:
    await client.set(f"{key}:lock", "other")


async def _not_active(storage: BullMQStorage, client: Any, key: str) -> None:
    await client.delete(f"bull:{storage.queue}:active")


async def _with_children(storage: BullMQStorage, client: Any, key: str) -> None:
    await client.sadd(f"{key}:dependencies", "child")


async def _with_failed_children(storage: BullMQStorage, client: Any, key: str) -> None:
    await client.zadd(f"{key}:unsuccessful", {"child": 1})


@pytest.mark.parametrize(
    ("prepare", "status", "reason"),
    [
        pytest.param(_removed, SettleStatus.LOST, LossReason.NOT_FOUND, id="-1 no job"),
        pytest.param(_recovered, SettleStatus.LOST, LossReason.TAKEN, id="-2 no lock"),
        pytest.param(_not_active, SettleStatus.LOST, LossReason.TAKEN, id="-3 not active"),
        pytest.param(_taken, SettleStatus.LOST, LossReason.TAKEN, id="-6 another's lock"),
        pytest.param(_with_children, SettleStatus.ERROR, None, id="-4 children"),
        pytest.param(_with_failed_children, SettleStatus.ERROR, None, id="-9 failed children"),
    ],
)
async def test_codes(
    storage: BullMQStorage,
    client: Any,
    prepare: Callable[[BullMQStorage, Any, str], Awaitable[None]],
    status: SettleStatus,
    reason: LossReason | None,
) -> None:
    """Each code of BullMQ's scripts becomes the outcome it means, and spares its neighbour."""
    await storage.enqueue([job("a"), job("b")])
    first, second = await storage.claim("w", leases=LEASES, limit=2)
    await prepare(storage, client, f"bull:{storage.queue}:{first.job_id}")
    outcomes = await storage.settle([Completed(claim=first, result=b"1"), Completed(claim=second, result=b"2")])
    assert (outcomes[0].status, outcomes[0].reason) == (status, reason)
    assert (outcomes[0].detail is None) == (status is SettleStatus.LOST)
    assert outcomes[1].status is (SettleStatus.LOST if prepare is _not_active else SettleStatus.APPLIED)


def test_an_unknown_code_is_an_error() -> None:
    """A code that a later package might bring is reported, not taken for success."""
    outcome = code_outcome(-99)
    assert outcome is not None
    assert outcome.status is SettleStatus.ERROR
    assert "-99" in (outcome.detail or "")


@pytest.mark.parametrize(
    "make",
    [
        lambda claim: Completed(claim=claim, result=b"1"),
        lambda claim: Failed(claim=claim, error=ERROR),
        lambda claim: Retried(claim=claim, delay=timedelta(hours=1), error=ERROR),
        lambda claim: Released(claim=claim),
        lambda claim: Continued(claim=claim, then=job(claim.job_id, chain_index=1)),
    ],
)
async def test_an_expired_lock_still_settles(
    storage: BullMQStorage, client: Any, make: Callable[[Claim], Settlement]
) -> None:
    """BullMQ takes an expired lock as lost; as long as nobody recovered the job, its claim is good."""
    await storage.enqueue([job("a")])
    claim = await claim_one(storage)
    await client.delete(f"bull:{storage.queue}:a:lock")
    assert dict((await storage.renew([claim])).lost) == {}
    await client.delete(f"bull:{storage.queue}:a:lock")
    [first] = await storage.settle([make(claim)])
    [again] = await storage.settle([make(claim)])
    assert (first.status, again.status) == (SettleStatus.APPLIED, SettleStatus.ALREADY_APPLIED)


async def test_a_foreign_worker_that_took_the_job_is_not_overruled(storage: BullMQStorage, client: Any) -> None:
    """A worker that writes no name leaves our token in the record; its own expired lock does not give us the job."""
    await storage.enqueue([job("a", max_attempts=9)])
    claim = await claim_one(storage)
    key = f"bull:{storage.queue}:a"
    await _recovered(storage, client, key)
    other = await claim_one(storage)
    await client.hset(key, "pb", claim.token)
    await client.delete(f"{key}:lock")
    [outcome] = await storage.settle([Completed(claim=claim, result=b"1")])
    assert (outcome.status, outcome.reason) == (SettleStatus.LOST, LossReason.TAKEN)
    assert other.attempt == 2


async def test_a_settlement_given_back_is_not_settled_twice(storage: BullMQStorage, client: Any) -> None:
    """After an uncounted retry a nameless worker ran the same attempt; the first claim, repeated, changes nothing."""
    await storage.enqueue([job("a")])
    claim = await claim_one(storage)
    again = Retried(claim=claim, delay=timedelta(0), error=ERROR, counted=False)
    await storage.settle([again])
    assert (await claim_one(storage)).attempt == claim.attempt
    key = f"bull:{storage.queue}:a"
    await client.hset(key, "pb", claim.token)
    await client.delete(f"{key}:lock")
    [outcome] = await storage.settle([again])
    assert (outcome.status, outcome.reason) == (SettleStatus.LOST, LossReason.TAKEN)


async def test_a_lost_completion_continues_nothing(storage: BullMQStorage, client: Any) -> None:
    """Whose job was given back does not enqueue what was to follow it; who completes it then does."""
    await storage.enqueue([job("a", max_attempts=9)])
    claim = await claim_one(storage)
    await _recovered(storage, client, f"bull:{storage.queue}:a")
    again = await claim_one(storage)
    [lost] = await storage.settle([Completed(claim=claim, result=b"1", then=job("of the lost one"))])
    [outcome] = await storage.settle([Completed(claim=again, result=b"2", then=job("next"))])
    assert (lost.status, outcome.status) == (SettleStatus.LOST, SettleStatus.APPLIED)
    unknown, following = await storage.status(["of the lost one", "next"])
    assert unknown is None
    assert following is not None


async def test_a_settlement_into_what_is_no_record_of_the_queue(storage: BullMQStorage, client: Any) -> None:
    """It is nothing of the job: it is settled once that is gone, as if nobody had tried before; its neighbour is."""
    await storage.enqueue([job("a"), job("b")])
    first, second = await storage.claim("w", leases=LEASES, limit=2)
    await client.set(f"bull:{storage.queue}:failed", "foreign")
    settlements: list[Settlement] = [Failed(claim=first, error=ERROR), Completed(claim=second, result=b"1")]
    with pytest.raises(StorageUnavailable, match="failed is a string, not a zset"):
        await storage.settle(settlements)
    await client.delete(f"bull:{storage.queue}:failed")
    outcomes = await storage.settle(settlements)
    assert [outcome.status for outcome in outcomes] == [SettleStatus.APPLIED, SettleStatus.ALREADY_APPLIED]


async def test_a_job_that_cannot_end_spoils_none_of_its_batch(storage: BullMQStorage, client: Any) -> None:
    """Each job of a batch has an answer of its own, also behind one at whose key the script stops."""
    await storage.enqueue([job(name) for name in "abcd"])
    claims = await storage.claim("w", leases=LEASES, limit=10)
    base = f"bull:{storage.queue}:"
    await client.set(f"{base}{claims[1].job_id}", "no hash")
    await client.delete(f"{base}{claims[2].job_id}")
    outcomes = await storage.settle([Completed(claim=claim, result=b"1") for claim in claims])
    expected = [SettleStatus.APPLIED, SettleStatus.ERROR, SettleStatus.LOST, SettleStatus.APPLIED]
    assert [one.status for one in outcomes] == expected


async def test_more_than_a_script_takes_at_once(storage: BullMQStorage) -> None:
    """A claim and a settlement of more jobs than one script takes have each of them once, in their order."""
    await storage.enqueue([job() for _ in range(2 * JOBS_A_SCRIPT + 1)])
    waiting = {one.id for one in (await storage.list(JobState.QUEUED, limit=1_000)).jobs}
    claims = await storage.claim("w", leases=LEASES, limit=1_000)
    assert (len(claims), {claim.job_id for claim in claims}) == (len(waiting), waiting)
    ends = [
        Failed(claim=claim, error=ERROR) if at % 2 else Completed(claim=claim, result=b"1")
        for at, claim in enumerate(claims)
    ]
    assert {one.status for one in await storage.settle(ends)} == {SettleStatus.APPLIED}
    counts = await storage.counts()
    assert (counts[JobState.COMPLETED], counts[JobState.FAILED]) == (JOBS_A_SCRIPT + 1, JOBS_A_SCRIPT)


async def test_a_script_moves_few_of_many_jobs_that_are_due(storage: BullMQStorage, client: Any) -> None:
    """While more jobs are due than BullMQ moves at each claim, a script claims one: the server has others to serve."""
    await storage.enqueue([job(delay=timedelta(hours=1)) for _ in range(1_001)])
    delayed = f"bull:{storage.queue}:delayed"
    await client.zadd(delayed, dict.fromkeys(await client.zrange(delayed, 0, -1), 0))  # an hour later, for all of them
    assert len(await storage.claim("w", leases=LEASES, limit=5)) == 1
    assert await client.zcard(delayed) == 1
    assert len(await storage.claim("w", leases=LEASES, limit=5)) == 5


async def test_another_storages_claim_is_refused(storage: BullMQStorage) -> None:
    """A claim that BullMQ did not make cannot be settled here."""
    await storage.enqueue([job("a")])
    claim = await claim_one(storage)
    fields = {name: getattr(claim, name) for name in Claim.__dataclass_fields__}
    with pytest.raises(StorageError, match="another storage"):
        await storage.settle([Released(claim=Claim(**fields))])


async def test_the_old_record_of_a_child_goes_with_another_jobs_end(storage: BullMQStorage, client: Any) -> None:
    """Its parent, which waited for it, is released; no settlement stops half-way."""
    base = f"bull:{storage.queue}:"
    parent, child = f"{base}parent", f"{base}child"
    await client.hset(parent, mapping={"name": "work", "data": "{}", "opts": "{}", "timestamp": 1, "priority": 0})
    await client.zadd(f"{base}waiting-children", {"parent": 1})
    await client.sadd(f"{parent}:dependencies", child)
    await storage.enqueue([job("child", keep_failed=timedelta(hours=1)), job("other")])
    await client.hset(child, "parentKey", parent)
    await client.hset(f"{base}other", "opts", '{"attempts": 1, "removeOnFail": {"count": 1}}')
    for ended in ("child", "other"):
        claim = await claim_one(storage)
        [outcome] = await storage.settle([Failed(claim=claim, error=ERROR)])
        assert (claim.job_id, outcome.status) == (ended, SettleStatus.APPLIED)
    assert not await client.exists(child)
    assert (await claim_one(storage)).job_id == "parent"


async def _told(storage: BullMQStorage, client: Any) -> list[tuple[str, str | None]]:
    """The events about the queue's one job so far, and where it was before each."""
    entries = await client.xrange(f"bull:{storage.queue}:events")
    return [(event["event"], event.get("prev")) for _, event in entries if "jobId" in event]


async def test_a_retry_at_once_is_told_as_node_tells_it(storage: BullMQStorage, client: Any) -> None:
    """It waits again after it was active, and is never delayed; our own subscribers hear that it is failing."""
    await storage.enqueue([job("job")])
    held = await claim_one(storage)
    async with storage.subscribe("job") as subscription:
        await storage.settle([Retried(claim=held, delay=timedelta(0), error=ERROR)])
        await expect(subscription, JobEventKind.FAILING)
    assert (await _told(storage, client))[-2:] == [("active", "waiting"), ("waiting", "active")]
    assert (await claim_one(storage)).attempt == 2


@pytest.mark.parametrize(("delay", "was"), [(timedelta(0), "waiting"), (timedelta(hours=1), "delayed")])
async def test_a_cancelled_job_that_waited_never_was_active(
    storage: BullMQStorage, client: Any, delay: timedelta, was: str
) -> None:
    """To Node it failed where it was."""
    await storage.enqueue([job("job", delay=delay)])
    await storage.cancel("job")
    assert (await _told(storage, client))[-1] == ("failed", was)


async def test_a_cancelled_job_that_ran_was_active(storage: BullMQStorage, client: Any) -> None:
    """To Node it failed while it was active."""
    await storage.enqueue([job("job")])
    held = await claim_one(storage)
    await storage.settle([Cancelled(claim=held)])
    assert (await _told(storage, client))[-1] == ("failed", "active")


async def test_a_snooze_leaves_nothing_of_a_failure(storage: BullMQStorage, client: Any) -> None:
    """Nobody who reads the record takes the job for one that failed, nor its end for a failure."""
    await storage.enqueue([job("job")])
    await storage.settle([snoozed(await claim_one(storage))])
    await storage.settle([Completed(claim=await claim_one(storage), result=b"1")])
    record = await client.hgetall(f"bull:{storage.queue}:job")
    assert not {"failedReason", "stacktrace"} & record.keys()
    assert record["returnvalue"] == "1"
