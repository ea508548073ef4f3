"""What lies in a queue on Redis and is none of ours is refused, or set aside with a reason; the others run."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.workers.storage.redis.steps import LEASES, SETS, VERBS, key, one_in_every_set
from workers import JobState
from workers.errors import StorageDamaged
from workers.jobs import (
    Claim,
    Completed,
    EnqueueStatus,
    SettleStatus,
)
from workers.storage.redis import RedisStorage
from workers.testing.steps import HOUR, claim_one, job


@pytest.mark.parametrize("name", SETS)
async def test_a_key_of_another_type_is_an_error_that_changes_nothing(
    name: str, storage: RedisStorage, client: Any
) -> None:
    """Every verb refuses a queue with a foreign key in it; when it is taken away, the queue is as it was."""
    await one_in_every_set(storage)
    before = await storage.counts()
    [held] = (await storage.list(JobState.PROCESSING)).jobs
    claim = Claim(
        job_id=held.id,
        name="work",
        payload=b"",
        token="0" * 28,
        worker_id="w",
        lease=HOUR,
        attempt=1,
        max_attempts=3,
        created_at=held.created_at,
        keep_completed=HOUR,
        keep_failed=HOUR,
    )
    await client.rename(key(storage, name), key(storage, "aside"))
    await client.set(key(storage, name), "foreign")
    for verb in VERBS.values():
        with pytest.raises(StorageDamaged, match=r"the queue is damaged: .* is a string, not a"):
            await verb(storage, claim)
    await client.rename(key(storage, "aside"), key(storage, name))
    assert await storage.counts() == before


@pytest.mark.parametrize("delay", [timedelta(0), HOUR], ids=["now", "later"])
@pytest.mark.parametrize("name", SETS)
async def test_a_single_job_is_refused_for_the_keys_that_it_needs(
    name: str, delay: timedelta, storage: RedisStorage, client: Any
) -> None:
    """Then nothing has changed. Behind another foreign key it is stored whole, and claimed once that is gone."""
    await one_in_every_set(storage)
    before = await storage.counts()
    await client.rename(key(storage, name), key(storage, "aside"))
    await client.set(key(storage, name), "foreign")
    if name in ("jobs", "meta", "sleepers", "scheduled" if delay else "ready"):
        with pytest.raises(StorageDamaged, match=r"the queue is damaged: .* is a string, not a"):
            await storage.enqueue([job("x", delay=delay)])
        added = 0
    else:
        await storage.enqueue([job("x", delay=delay)])
        added = 1
        with pytest.raises(StorageDamaged):
            await storage.claim("w", leases=LEASES, limit=10)
    await client.rename(key(storage, "aside"), key(storage, name))
    state = JobState.SCHEDULED if delay else JobState.QUEUED
    assert await storage.counts() == {**before, state: before[state] + added}
    await storage.resume()
    if not delay:
        claimed = [claim.job_id for claim in await storage.claim("w", leases=LEASES, limit=10)]
        assert claimed.count("x") == added


@pytest.mark.parametrize("damage", [b"", b"garbage", b"\x01short", b"\x02" + bytes(44), None])
async def test_a_record_that_is_not_ours_is_set_aside(damage: bytes | None, storage: RedisStorage, client: Any) -> None:
    """The job fails with a reason and keeps its bytes; its neighbours run, and no claim meets it again."""
    await storage.enqueue([job("bad"), job("good")])
    if damage is None:
        await client.hdel(key(storage, "jobs"), "bad")
    else:
        await client.hset(key(storage, "jobs"), "bad", damage)
    assert [claim.job_id for claim in await storage.claim("w", leases=LEASES, limit=5)] == ["good"]
    outcome = await storage.result("bad")
    assert outcome is not None
    assert outcome.error is not None
    assert outcome.error.type == "CorruptRecord"
    assert (await client.hget(key(storage, "jobs"), "bad")).endswith(damage or b"")
    assert (await storage.enqueue([job("bad")]))[0].status is EnqueueStatus.QUEUED


async def test_a_damaged_attempt_fails_no_neighbour(storage: RedisStorage, client: Any) -> None:
    """Settling it is an error with a reason, recovering it lets it go, and the others are settled."""
    await storage.enqueue([job("bad"), job("good")])
    bad, good = await storage.claim("w", leases={"*": timedelta(microseconds=1)}, limit=5)
    await client.hset(key(storage, "runs"), "bad", b"garbage")
    outcomes = await storage.settle([Completed(claim=bad, result=b"1"), Completed(claim=good, result=b"1")])
    assert [outcome.status for outcome in outcomes] == [SettleStatus.ERROR, SettleStatus.APPLIED]
    assert outcomes[0].detail
    assert (await storage.recover(10)).requeued == ()
    assert (await storage.counts())[JobState.PROCESSING] == 0


async def test_what_stands_in_line_by_mistake_runs_nothing(storage: RedisStorage, client: Any) -> None:
    """Foreign members, and a job that stands in line a second time, are dropped by the claim that meets them."""
    await storage.enqueue([job("a")])
    [member] = await client.zrange(key(storage, "ready"), 0, 0)
    claim = await claim_one(storage)
    await client.zadd(key(storage, "ready"), {b"\xff\xff": 0, b"foreign": 0, member: 0})
    assert await storage.claim("w", leases=LEASES, limit=5) == []
    assert await client.zcard(key(storage, "ready")) == 0
    assert [one.status for one in await storage.settle([Completed(claim=claim, result=b"")])] == [SettleStatus.APPLIED]


async def test_an_ordering_key_of_a_job_that_vanished_is_free(storage: RedisStorage, client: Any) -> None:
    """When somebody deletes a running job by hand, the other jobs of its key run on."""
    await storage.enqueue([job(name, ordering_key="key") for name in ("gone", "first", "second")])
    await claim_one(storage)
    assert await storage.claim("w", leases=LEASES, limit=5) == []
    await client.zrem(key(storage, "leases"), "gone")
    await client.hdel(key(storage, "runs"), "gone")
    await client.hdel(key(storage, "jobs"), "gone")
    await storage.enqueue([job("third", ordering_key="key")])
    claim = await claim_one(storage)
    await storage.settle([Completed(claim=claim, result=b"")])
    assert (await claim_one(storage)).job_id == "first"


async def test_a_drain_takes_what_is_not_ours(storage: RedisStorage, client: Any) -> None:
    """Foreign members of the sets are drained like jobs."""
    for name in ("ready", "held", "scheduled", "failing"):
        await client.zadd(key(storage, name), {b"\xff": 0})
    assert (await storage.list(JobState.QUEUED)).jobs == ()
    assert await storage.drain() == 4
    assert (await storage.counts())[JobState.QUEUED] == 0
