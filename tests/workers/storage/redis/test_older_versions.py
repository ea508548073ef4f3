"""What a version left in Redis that kept no record of a cancelled job, and what it makes of ours."""

from __future__ import annotations

import struct
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tests.workers.storage.redis.steps import LEASES, key
from workers.jobs import Cancelled, EnqueueStatus, JobOutcome, JobRef, JobState, OutcomeKind, Released, Retried
from workers.storage.redis import RedisStorage
from workers.testing.steps import ERROR, HOUR, completed, enqueue, failed, job

CANCELLED_CODE = 6


async def test_a_tombstone_is_read_as_one(storage: RedisStorage, client: Any) -> None:
    """It says that the job was cancelled until its time is over, and is in nobody's way."""
    seconds, _ = await client.time()
    until = (seconds + 3600) * 1_000_000
    run = struct.pack(">BBIIHQQQ14sHI", CANCELLED_CODE, 0, 0, 0, 0, 1, 1, until, bytes(14), 0, 0)
    for name in ("old", "again", "over"):
        await client.hset(key(storage, "jobs"), name, b"")
        await client.hset(key(storage, "runs"), name, run)
        await client.zadd(key(storage, "cancelled"), {name: 1 if name == "over" else until})
    assert await storage.result("old") == JobOutcome(kind=OutcomeKind.CANCELLED)
    assert await storage.status(["old"]) == [None]
    assert (await storage.list(JobState.CANCELLED)).jobs == ()
    assert await storage.retry(["old"]) == 0
    assert [one.status for one in await storage.enqueue([job("again")])] == [EnqueueStatus.QUEUED]
    assert [held.job_id for held in await storage.claim("w", leases=LEASES, limit=5)] == ["again"]
    assert await storage.sweep(10) == 1
    assert await client.zrange(key(storage, "cancelled"), 0, -1) == [b"old"]


async def test_older_versions_know_where_ours_stand(storage: RedisStorage, client: Any) -> None:
    """A cancelled job has the run and stands in the line that tombstones had, whether it waited or ran."""
    await enqueue(storage, job("ran"))
    (held,) = await storage.claim("w", leases=LEASES, limit=1)
    await enqueue(storage, job("waited"))
    await storage.cancel("waited")
    await storage.settle([Cancelled(claim=held)])
    for name in ("ran", "waited"):
        assert (await client.hget(key(storage, "runs"), name))[0] == CANCELLED_CODE
    assert sorted(await client.zrange(key(storage, "cancelled"), 0, -1)) == [b"ran", b"waited"]


async def test_what_older_versions_end_strands_nobody(storage: RedisStorage, client: Any) -> None:
    """They look for no dependents: the sweep finds those whose jobs have ended, in portions, and lets others wait."""
    names = ["done", "bad", "gone", "kept"]
    await enqueue(storage, *(job(name) for name in names))
    await enqueue(storage, *(replace(job(f"after-{name}"), after=(name,)) for name in names))
    done, bad = await storage.claim("w", leases=LEASES, limit=2)
    hidden = key(storage, "hidden")
    await client.rename(key(storage, "dependents"), hidden)  # as if there were none
    await storage.settle([completed(done), failed(bad)])
    await storage.remove(["gone"])
    await client.rename(hidden, key(storage, "dependents"))
    await storage.sweep(10)
    found = await storage.status([f"after-{name}" for name in names])
    expected = [JobState.QUEUED, JobState.FAILED, JobState.FAILED, JobState.WAITING]
    assert [one and one.state for one in found] == expected
    (released,) = [held for held in await storage.claim("w", leases=LEASES, limit=5) if held.job_id != "kept"]
    assert released.job_id == "after-done"


async def test_what_older_versions_remove_leaves_nothing_told(storage: RedisStorage, client: Any) -> None:
    """They remove a job and not what it was told, which the sweep finds, in portions; what others may read stays."""
    names = [f"{number:03}" for number in range(250)]
    await enqueue(storage, job("one"), job("kept-by"), replace(job("waits"), after=("kept-by",)))
    (held, _) = await storage.claim("w", leases=LEASES, limit=2)
    await storage.settle([completed(held, b"1")])
    await enqueue(storage, *(replace(job(name), after=("one",)) for name in names))
    await client.hdel(key(storage, "jobs"), *names[1:])
    await storage.sweep(10)
    await storage.sweep(10)
    one = JobRef(storage.queue, "one")
    assert await storage.outcomes(names[0]) == {one: JobOutcome(kind=OutcomeKind.COMPLETED, result=b"1")}
    assert await storage.followed("waits") == [JobRef(storage.queue, "kept-by")]
    assert await client.zcard(key(storage, "dependents")) == 2


async def test_older_versions_take_failures_for_no_result(storage: RedisStorage, client: Any) -> None:
    """They stand where a result would, which nobody reads of a job that has not completed; an older claim drops them.

    What is left then is read as a job without failed attempts.
    """
    await enqueue(storage, job("job"))
    (held,) = await storage.claim("w", leases=LEASES, limit=1)
    await storage.settle([Retried(claim=held, delay=timedelta(0), error=ERROR)])
    run = await client.hget(key(storage, "runs"), "job")
    *_, worker, size = struct.unpack_from(">BBIIHQQQ14sHI", run)
    assert worker == 0
    head = struct.calcsize(">BBIIHQQQ14sHI") + size
    [found] = await storage.read(["job"])
    assert found is not None
    assert [one.attempt for one in found.failures] == [1]
    assert b'"ValueError"' in run[head:]
    await client.hset(key(storage, "runs"), "job", run[:head])  # as an older claim writes it
    [found] = await storage.read(["job"])
    assert found is not None
    assert (found.failures, found.status.last_error) == ((), ERROR)


@pytest.mark.parametrize("names", [("*",), ("work",)], ids=["every name", "its name"])
async def test_older_versions_take_urgent_jobs_for_the_last(
    storage: RedisStorage, client: Any, names: tuple[str, ...]
) -> None:
    """They claim one under a name that none of theirs has, and put it back behind all others: that loses nothing."""
    await enqueue(storage, job("urgent", priority=-3), job("plain"))
    place, priority = struct.unpack_from(">BQQI", await client.hget(key(storage, "jobs"), "urgent"))[1::2]
    assert priority == 2**31 - 3
    name, strange = struct.pack(">H", 4) + b"work", struct.pack(">H", 5) + b"\xffwork"
    standing = strange + struct.pack(">IQ", 997, place) + b"urgent"
    assert await client.zrem(key(storage, "ready"), standing) == 1
    again = name + struct.pack(">IQ", priority, place) + b"urgent"
    await client.zadd(key(storage, "ready"), {again: 0})  # as an older release leaves it
    await storage.wait(names, timeout=HOUR)
    claims = await storage.claim("w", leases=dict.fromkeys(names, HOUR), limit=5)
    assert [(held.job_id, held.priority) for held in claims] == [("plain", 0), ("urgent", -3)]
    await storage.settle([Released(claim=held) for held in claims])
    assert await client.zrange(key(storage, "ready"), 1, -1) == [standing]
