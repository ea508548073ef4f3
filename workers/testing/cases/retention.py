"""How long finished jobs are kept, and that nothing stays for ever."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from workers.errors import LossReason
from workers.jobs import DROP, CancelResult, EnqueueStatus, Failed, JobOutcome, JobState, OutcomeKind
from workers.storage.base import Storage
from workers.testing.case import MOVES_TIME, RESULT_TTL_UPDATES, RETENTION_PER_JOB, case
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
    failed,
    job,
    recover,
    released,
    state,
)


async def _swept(harness: Harness, storage: Storage, job_id: str) -> None:
    """Sweeping removes the record, once its time is over."""
    async with asyncio.timeout(PATIENCE):
        await storage.sweep(1_000)
        while await state(storage, job_id) is not None:
            await harness.advance(harness.moment)
            await storage.sweep(1_000)


@case(guarantees=(6, 12), needs=(RETENTION_PER_JOB,))
async def results_expire_one_by_one(harness: Harness) -> None:
    """Each record goes when its own retention is over, and nothing else goes with it."""
    storage = await harness.open()
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
async def an_expired_id_is_free(harness: Harness) -> None:
    """When its retention is over an id may be enqueued again, swept or not."""
    storage = await harness.open()
    await enqueue(storage, job("again", keep=harness.moment))
    await apply(storage, completed(await claim_one(storage), b"old"))
    await harness.advance(harness.moment)
    async with asyncio.timeout(PATIENCE):
        while (await storage.enqueue([job("again")]))[0].status is not EnqueueStatus.QUEUED:
            await harness.advance(harness.moment)
    assert await storage.result("again") is None
    assert (await claim_one(storage)).attempt == 1


@case(guarantees=(6,), needs=(RETENTION_PER_JOB, MOVES_TIME))
async def an_expired_record_is_gone_unswept(harness: Harness) -> None:
    """A record whose time is over reads as gone at that moment, however late the sweep."""
    storage = await harness.open()
    await enqueue(storage, job("done", keep=harness.moment), job("bad", keep=harness.moment), job("cancelled"))
    done, bad, other = await claim(storage, 3)
    await apply(storage, completed(done), failed(bad), released(other))
    await storage.cancel("cancelled")
    await harness.advance(harness.moment)
    assert await storage.status(["done", "bad"]) == [None, None]
    assert [await storage.result(name) for name in ("done", "bad")] == [None, None]
    assert set((await storage.counts()).values()) == {0}
    assert (await storage.list(JobState.COMPLETED)).jobs == ()
    assert await storage.cancel("done") is CancelResult.NOT_FOUND
    assert await storage.retry(["bad"]) == 0
    assert dict((await storage.renew([done])).lost) == {done.token: LossReason.NOT_FOUND}
    await harness.advance(HOUR)
    assert await storage.result("cancelled") is None


@case(needs=(RETENTION_PER_JOB,))
async def a_settlement_may_choose_the_retention(harness: Harness) -> None:
    """`keep` of a settlement wins over the job's own retention, for longer, for shorter and for `DROP`."""
    storage = await harness.open()
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


@case()
async def jobs_may_drop_themselves(harness: Harness) -> None:
    """A job that keeps nothing leaves nothing, completed or failed."""
    storage = await harness.open()
    await enqueue(storage, job("done", keep=DROP), job("bad", keep=DROP))
    claims = {held.job_id: held for held in await claim(storage, 2)}
    await apply(storage, completed(claims["done"]), failed(claims["bad"]))
    assert await storage.status(["done", "bad"]) == [None, None]
    assert set((await storage.counts()).values()) == {0}


@case(guarantees=(12,), needs=(RETENTION_PER_JOB,))
async def a_sweep_is_bounded(harness: Harness) -> None:
    """A sweep removes at most its limit of all kinds together and tells how many, until nothing is left."""
    storage = await harness.open()
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
async def tombstones_and_worker_records_expire(harness: Harness) -> None:
    """A cancelled job's tombstone lasts an hour, a worker's record not for ever."""
    storage = await harness.open()
    await enqueue(storage, job("cancelled"))
    await storage.cancel("cancelled")
    await claim(storage, worker_id="seen once")
    await harness.advance(HOUR - timedelta(seconds=1))
    assert await storage.result("cancelled") == JobOutcome(kind=OutcomeKind.CANCELLED)
    await harness.advance(timedelta(days=2))
    await storage.sweep(1_000)
    assert await storage.result("cancelled") is None
    assert await storage.workers() == []


@case(needs=(RESULT_TTL_UPDATES,))
async def a_results_time_can_be_changed(harness: Harness) -> None:
    """`update_result_ttl` counts from now, for finished jobs only."""
    storage = await harness.open()
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


@case(guarantees=(6,), needs=(RETENTION_PER_JOB, MOVES_TIME))
async def a_stalled_jobs_error_expires_too(harness: Harness) -> None:
    """The record of a job that the reaper failed lasts as long as any failed one."""
    storage = await harness.open()
    await enqueue(storage, job("stalled", max_attempts=1, keep=2 * HOUR))
    await crash(harness, storage)
    await recover(harness, storage, 1)
    await harness.advance(HOUR)
    assert await state(storage, "stalled") is JobState.FAILED
    await harness.advance(HOUR)
    assert await state(storage, "stalled") is None
