"""The retention of finished jobs, and that nothing stays for ever."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

from workers.errors import LossReason
from workers.jobs import (
    DROP,
    CancelResult,
    EnqueueStatus,
    Failed,
    JobEventKind,
    JobOutcome,
    JobState,
    OutcomeKind,
    SettleOutcome,
    SettleStatus,
)
from workers.storage.base import Storage
from workers.testing.case import MEASURES, MOVES_TIME, RESULT_TTL_UPDATES, RETENTION_PER_JOB, case
from workers.testing.harness import Harness
from workers.testing.steps import (
    ERROR,
    HOUR,
    PATIENCE,
    apply,
    claim,
    claim_one,
    completed,
    crash,
    enqueue,
    expect,
    failed,
    job,
    recover,
    retried,
    settle,
    state,
    stopped,
)

NOT_FOUND = SettleOutcome(status=SettleStatus.LOST, reason=LossReason.NOT_FOUND)


async def _swept(harness: Harness, storage: Storage, job_id: str) -> None:
    """Check that sweeping removes the record once its time is over."""
    async with asyncio.timeout(PATIENCE):
        await storage.sweep(1_000)
        while await state(storage, job_id) is not None:
            await harness.advance(harness.moment)
            await storage.sweep(1_000)


@case(guarantees=(6, 12), needs=(RETENTION_PER_JOB,))
async def results_expire_one_by_one(harness: Harness, storage: Storage) -> None:
    """Each record goes when its own retention is over, and nothing else goes with it."""
    await enqueue(storage, job("short", keep=harness.moment), job("long"), job("bad", keep=harness.moment))
    claims = {held.job_id: held for held in await claim(storage, 3)}
    await apply(storage, completed(claims["short"], b"1"), completed(claims["long"], b"2"), failed(claims["bad"]))
    await enqueue(storage, job("waiting"), job("scheduled", delay=HOUR))
    await harness.advance(harness.moment)
    await _swept(harness, storage, "short")
    await _swept(harness, storage, "bad")
    assert await storage.result("short") is None
    assert await storage.result("long") == JobOutcome(kind=OutcomeKind.COMPLETED, result=b"2")
    assert await state(storage, "waiting") is JobState.QUEUED
    assert await state(storage, "scheduled") is JobState.SCHEDULED


@case(guarantees=(2, 6), needs=(RETENTION_PER_JOB,))
async def an_expired_id_is_free(harness: Harness, storage: Storage) -> None:
    """When its retention is over, an id may be enqueued again, swept or not."""
    await enqueue(storage, job("again", keep=harness.moment))
    await apply(storage, completed(await claim_one(storage), b"old"))
    await harness.advance(harness.moment)
    async with asyncio.timeout(PATIENCE):
        while (await storage.enqueue([job("again")]))[0].status is not EnqueueStatus.QUEUED:
            await harness.advance(harness.moment)
    assert await storage.result("again") is None
    assert (await claim_one(storage)).attempt == 1


@case(guarantees=(6,), needs=(RETENTION_PER_JOB,))
async def an_expired_record_is_gone_unswept(harness: Harness, storage: Storage) -> None:
    """A record whose time is over reads as gone at that moment, however late the sweep."""
    await enqueue(storage, job("done", keep=harness.moment), job("bad", keep=harness.moment))
    done, bad = await claim(storage, 2)
    await apply(storage, completed(done), failed(bad))
    await harness.advance(harness.moment)
    assert await storage.status(["done", "bad"]) == [None, None]
    assert [await storage.result(name) for name in ("done", "bad")] == [None, None]
    assert set((await storage.counts()).values()) == {0}
    assert (await storage.list(JobState.COMPLETED)).jobs == ()
    assert await storage.cancel("done") is CancelResult.NOT_FOUND
    assert await storage.retry(["bad"]) == 0
    assert await storage.clean(JobState.COMPLETED, older_than=timedelta(0)) == 0
    assert dict((await storage.renew([done])).lost) == {done.token: LossReason.NOT_FOUND}


@case(guarantees=(6,), needs=(RETENTION_PER_JOB,))
async def a_settlement_may_choose_the_retention(harness: Harness, storage: Storage) -> None:
    """`keep` of a settlement overrides the job's own retention: longer, shorter, or `DROP`."""
    await enqueue(storage, job("longer", keep=harness.moment), job("shorter"), job("bad", keep=HOUR))
    claims = {held.job_id: held for held in await claim(storage, 3)}
    await apply(
        storage,
        completed(claims["longer"], b"1", keep=HOUR),
        completed(claims["shorter"], b"2", keep=harness.moment),
        Failed(claim=claims["bad"], error=ERROR, keep=DROP),
    )
    assert await state(storage, "bad") is None
    await harness.advance(harness.moment)
    await _swept(harness, storage, "shorter")
    assert await storage.result("longer") == JobOutcome(kind=OutcomeKind.COMPLETED, result=b"1")


@case(guarantees=(6, 12))
async def jobs_may_drop_themselves(storage: Storage) -> None:
    """A job that keeps nothing leaves nothing, completed or failed."""
    await enqueue(storage, job("done", keep=DROP), job("bad", keep=DROP))
    claims = {held.job_id: held for held in await claim(storage, 2)}
    await apply(storage, completed(claims["done"]), failed(claims["bad"]))
    assert await storage.status(["done", "bad"]) == [None, None]
    assert set((await storage.counts()).values()) == {0}


@case(guarantees=(2, 6, 12, 20))
async def a_failure_may_leave_no_record(storage: Storage, other: Storage) -> None:
    """A job failed with `DROP`, whatever its own retention, is reported as failed and gone; its id is free at once."""
    await enqueue(storage, job("kept"), job("gone"))
    claims = {held.job_id: held for held in await claim(storage, 2)}
    await apply(storage, failed(claims["kept"]))
    failure = Failed(claim=claims["gone"], error=ERROR, keep=DROP)
    async with other.subscribe("gone") as events:
        await apply(storage, failure)
        await expect(events, JobEventKind.FAILED)
    assert (await state(storage, "gone"), await storage.result("gone")) == (None, None)
    assert (await storage.counts())[JobState.FAILED] == 1, "the record of another failure stays"
    assert await settle(storage, failure) == NOT_FOUND
    await enqueue(storage, job("gone", payload=b"again"))
    fresh = await claim_one(storage)
    assert (fresh.job_id, fresh.payload, fresh.attempt) == ("gone", b"again", 1)


@case(guarantees=(12,), needs=(RETENTION_PER_JOB,))
async def a_sweep_is_bounded(harness: Harness, storage: Storage) -> None:
    """A sweep removes at most its limit of all kinds together and returns how many, until nothing is left."""
    await enqueue(storage, *(job(f"job-{number}", keep=harness.moment) for number in range(25)))
    claims = await claim(storage, 25)
    await apply(storage, *(completed(held) for held in claims[:13]), *(failed(held) for held in claims[13:]))
    await harness.advance(harness.moment)
    assert await storage.sweep(10) == 10
    removed = [10]
    while removed[-1]:
        removed.append(await storage.sweep(10))
    assert removed == [10, 10, 5, 0]
    assert set((await storage.counts()).values()) == {0}
    assert await storage.sweep(10) == 0


@case(guarantees=(12,), needs=(MOVES_TIME,))
async def worker_records_expire(harness: Harness, storage: Storage) -> None:
    """A worker's record does not last for ever."""
    await claim(storage, worker_id="seen once")
    await harness.advance(timedelta(days=2))
    await storage.sweep(1_000)
    assert await storage.workers() == []


@case(guarantees=(6, 22), needs=(RESULT_TTL_UPDATES,))
async def a_results_time_can_be_changed(harness: Harness, storage: Storage) -> None:
    """`update_result_ttl` counts from now, for finished jobs only."""
    await enqueue(storage, job("shorter"), job("longer", keep=HOUR), job("running"))
    shorter, longer, _ = await claim(storage, 3)
    await apply(storage, completed(shorter), completed(longer, b"1"))
    assert await storage.update_result_ttl("shorter", harness.moment)
    assert await storage.update_result_ttl("longer", 2 * HOUR)
    assert not await storage.update_result_ttl("running", HOUR)
    assert not await storage.update_result_ttl("unknown", HOUR)
    await harness.advance(harness.moment)
    await _swept(harness, storage, "shorter")
    assert await storage.result("longer") == JobOutcome(kind=OutcomeKind.COMPLETED, result=b"1")


@case(guarantees=(6,), needs=(RETENTION_PER_JOB,))
async def a_stalled_jobs_error_expires_too(harness: Harness, storage: Storage) -> None:
    """The record of a job that the reaper failed lasts as long as that of any failed job."""
    await enqueue(storage, job("short", max_attempts=1, keep=harness.moment), job("long", max_attempts=1))
    await crash(harness, storage, limit=2)
    assert sorted((await recover(harness, storage, 2)).failed) == ["long", "short"]
    await harness.advance(harness.moment)
    await _swept(harness, storage, "short")
    assert await state(storage, "long") is JobState.FAILED


@case(guarantees=(12,), needs=(MEASURES,))
async def what_ended_leaves_nothing(harness: Harness, storage: Storage) -> None:
    """Of jobs of every fate, their names and ordering keys, no more is left after three rounds than after one."""
    await _every_fate(harness, storage, "first")
    before = await harness.entries(storage)
    await _every_fate(harness, storage, "second")
    await _every_fate(harness, storage, "third")
    assert await harness.entries(storage) <= before


async def _every_fate(harness: Harness, storage: Storage, word: str) -> None:
    """Let jobs be lost, retried, completed, failed, cancelled, removed, cleaned and drained; sweep what is left."""
    keep = harness.moment if harness.capabilities.retention_per_job else DROP
    keys = [f"{word}-{number}" if harness.capabilities.ordering_keys else None for number in range(10)]
    await enqueue(
        storage,
        *(
            job(f"{word}-{key}-{at}", name=f"{word}-{at}", ordering_key=key, keep=keep, max_attempts=9)
            for at, key in enumerate(keys)
        ),
    )
    async with storage.subscribe(f"{word}-ended"):
        await crash(harness, storage, limit=10)
        await recover(harness, storage, 10)
        done, *others = await claim(storage, 10)
        then = job(f"{word}-then", keep=keep)
        await apply(storage, replace(completed(done), then=then), *(retried(held) for held in others))
        again = await claim(storage, 10)
        await apply(storage, *map(completed, again[:4]), *map(failed, again[4:9]), *map(stopped, again[9:]))
    await enqueue(
        storage,
        *(job(f"{word}-{name}", delay=HOUR) for name in ("removed", "promoted", "drained")),
        job(f"{word}-cleaned"),
        job(f"{word}-cancelled", delay=HOUR, keep=keep),
    )
    await apply(storage, completed(await claim_one(storage)))
    await storage.cancel(f"{word}-cancelled")
    assert await storage.remove([f"{word}-removed"]) == 1
    assert await storage.promote([f"{word}-promoted"]) == 1
    assert await storage.drain() == 2
    assert await storage.clean(JobState.COMPLETED, older_than=timedelta.min) >= 1
    assert len(again) == 10
    async with asyncio.timeout(PATIENCE):
        while any((await storage.counts()).values()):
            await harness.advance(harness.moment)
            await storage.sweep(1_000)
    await storage.sweep(1_000)
