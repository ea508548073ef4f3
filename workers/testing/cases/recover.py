"""The promises of `recover`."""

from __future__ import annotations

import asyncio
from collections import Counter

from workers.jobs import DROP, Claim, ErrorInfo, Failed, JobEventKind, JobState, OutcomeKind
from workers.storage.base import Storage
from workers.testing.case import BOUNDED_RECOVERY, case
from workers.testing.harness import Harness
from workers.testing.steps import (
    LEASE,
    PATIENCE,
    apply,
    claim,
    claim_one,
    completed,
    crash,
    enqueue,
    ids,
    job,
    recover,
    state,
    status,
)


@case(guarantees=(5,))
async def a_crashed_workers_jobs_come_back(harness: Harness, storage: Storage) -> None:
    """Jobs whose lease expired are queued again, claimable by anyone, with the attempt counted."""
    await enqueue(storage, *(job(f"job-{number}") for number in range(3)))
    await crash(harness, storage, limit=3)
    recovery = await recover(harness, storage, 3)
    assert sorted(recovery.requeued) == ["job-0", "job-1", "job-2"]
    assert recovery.failed == ()
    assert await state(storage, "job-0") is JobState.QUEUED
    again = await claim(storage, 5, worker_id="another")
    assert [held.attempt for held in again] == [2, 2, 2]
    assert (await status(storage, "job-0")).worker_id == "another"


@case(guarantees=(5, 18))
async def live_leases_are_left_alone(harness: Harness, storage: Storage) -> None:
    """Only expired leases are recovered, among any number of live ones."""
    await enqueue(storage, *(job(f"job-{number}") for number in range(6)))
    live = await claim(storage, 3)
    dead = await crash(harness, storage, limit=3)
    recovery = await recover(harness, storage, 3)
    assert sorted(recovery.requeued) == sorted(ids(dead))
    for _ in range(harness.capabilities.recovery_passes):
        assert (await storage.recover(100)).requeued == ()
    await apply(storage, *(completed(held) for held in live))


@case(guarantees=(5,))
async def one_pass_is_enough_after_others(harness: Harness, storage: Storage) -> None:
    """Passes before a lease ends count: the first one after its end brings the job back."""
    await enqueue(storage, job("job"))
    await claim(storage, 1, lease=harness.moment)
    for _ in range(harness.capabilities.recovery_passes - 1):
        await storage.recover(100)
    await harness.advance(harness.moment)
    assert (await storage.recover(100)).requeued == ("job",)


@case(guarantees=(5, 18))
async def each_name_has_its_own_lease(harness: Harness, storage: Storage) -> None:
    """Of the jobs claimed in one call, those come back whose own lease has expired, and no others."""
    await enqueue(storage, job("short", name="short"), job("long", name="long"))
    claims = await storage.claim("worker", leases={"short": harness.moment, "long": LEASE}, limit=2)
    assert sorted(ids(claims)) == ["long", "short"]
    await harness.advance(harness.moment)
    assert (await recover(harness, storage, 1)).requeued == ("short",)
    assert await state(storage, "long") is JobState.PROCESSING


@case(guarantees=(5,))
async def any_number_of_reapers_recover_a_job_once(harness: Harness, storage: Storage) -> None:
    """Five reapers on five clients at the same time bring 60 jobs back, each once and with one stall."""
    reapers = [await harness.open(storage.queue) for _ in range(5)]
    await enqueue(storage, *(job(f"job-{number}") for number in range(60)))
    await crash(harness, storage, limit=60)
    brought_back: Counter[str] = Counter()
    for _ in range(harness.capabilities.recovery_passes):
        for recovery in await asyncio.gather(*(reaper.recover(100) for reaper in reapers)):
            assert recovery.failed == ()
            brought_back.update(recovery.requeued)
    brought_back.update((await recover(harness, storage, 60 - brought_back.total())).requeued)
    assert brought_back == Counter(f"job-{number}" for number in range(60))
    assert [held.attempt for held in await claim(storage, 100)] == [2] * 60


@case(guarantees=(5,))
async def recovery_is_batched(harness: Harness, storage: Storage) -> None:
    """Many jobs come back in as many calls as one job does, not in one call per job."""
    await enqueue(storage, *(job() for _ in range(200)))
    await crash(harness, storage, limit=200)
    recovered = await recover(harness, storage, 1)
    assert len(recovered.requeued) == 200


@case(guarantees=(5,), needs=(BOUNDED_RECOVERY,))
async def recovery_keeps_to_its_limit(harness: Harness, storage: Storage) -> None:
    """One recovery never brings back more jobs than its limit, and the next ones bring the rest."""
    await enqueue(storage, *(job() for _ in range(50)))
    await crash(harness, storage, limit=50)
    assert [len((await recover(harness, storage, 1, limit=20)).requeued) for _ in range(3)] == [20, 20, 10]


@case(guarantees=(5,))
async def a_backlog_does_not_hide_crashed_jobs(harness: Harness, storage: Storage) -> None:
    """Crashed jobs are brought back even if the backlog is never empty, and run before it."""
    await enqueue(storage, job("crashed"), *(job() for _ in range(300)))
    await crash(harness, storage)
    await enqueue(storage, *(job() for _ in range(50)))
    assert (await recover(harness, storage, 1)).requeued == ("crashed",)
    assert (await claim_one(storage)).job_id == "crashed"


@case(guarantees=(5,))
async def a_reaper_needs_no_memory(harness: Harness, storage: Storage) -> None:
    """A reaper that starts after the crash, on a client of its own, finds the jobs."""
    await enqueue(storage, job("job"))
    await crash(harness, storage)
    await harness.shut(storage)
    reaper = await harness.open(storage.queue)
    assert (await recover(harness, reaper, 1)).requeued == ("job",)
    assert (await claim_one(reaper)).attempt == 2


@case(guarantees=(4,))
async def the_last_attempt_lost_fails_the_job(harness: Harness, storage: Storage) -> None:
    """A job that kills its worker in its last attempt ends as failed with `StalledError` and never runs again."""
    await enqueue(storage, job("killer", max_attempts=2))
    await crash(harness, storage)
    await recover(harness, storage, 1)
    await crash(harness, storage)
    error = await _given_up(harness, storage, "killer", max_stalls=3)
    assert error.exhausted
    assert await claim(storage, 5) == []


@case(guarantees=(4,))
async def a_job_stalled_too_often_fails(harness: Harness, storage: Storage) -> None:
    """A job recovered more often than `max_stalls` ends as failed with `StalledError`, whatever attempts are left."""
    await enqueue(storage, job("staller", max_attempts=50))
    for _ in range(2):
        await crash(harness, storage)
        await recover(harness, storage, 1, max_stalls=2)
    await crash(harness, storage)
    await _given_up(harness, storage, "staller", max_stalls=2)
    assert (await status(storage, "staller")).attempt == 3


@case(guarantees=(4, 20))
async def a_job_given_up_is_told(harness: Harness, storage: Storage) -> None:
    """Those who wait for a job whose workers vanish hear that it failed, even if its record is not kept."""
    await enqueue(storage, job("kept", max_attempts=1), job("dropped", max_attempts=1, keep=DROP))
    for expected in ("kept", "dropped"):
        await crash(harness, storage)
        async with storage.subscribe(expected) as subscription, asyncio.timeout(PATIENCE):
            await _fail_stalled(harness, storage, expected)
            while (await subscription.get()).kind is not JobEventKind.FAILED:
                pass
    assert await state(storage, "kept") is JobState.FAILED
    assert await state(storage, "dropped") is None


async def _fail_stalled(harness: Harness, storage: Storage, job_id: str, *, max_stalls: int = 3) -> None:
    """Let recovery fail the job, or hand it out for that one purpose (`Claim.stalled`)."""
    recovery = await recover(harness, storage, 1, max_stalls=max_stalls)
    if job_id not in recovery.failed:
        held: Claim = await claim_one(storage)
        assert held.stalled is not None, "a job out of attempts or stalls was handed out to run"
        await apply(storage, Failed(claim=held, error=held.stalled))


async def _given_up(harness: Harness, storage: Storage, job_id: str, *, max_stalls: int) -> ErrorInfo:
    """Return the stored error of a job that recovery gives up."""
    await _fail_stalled(harness, storage, job_id, max_stalls=max_stalls)
    outcome = await storage.result(job_id)
    assert outcome is not None
    assert outcome.kind is OutcomeKind.FAILED
    assert outcome.error is not None
    assert outcome.error.type == "StalledError"
    assert outcome.error.message
    return outcome.error
