"""The promises to operators: `retry`, `remove`, `promote`, `drain`, `clean`; see also the cases on pausing."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from workers.jobs import UNCOUNTED_RETRIES, JobState
from workers.storage.base import Storage
from workers.testing.case import FRESH_RETRIES, ORDERING_KEYS, case
from workers.testing.harness import Harness
from workers.testing.steps import (
    HOUR,
    PATIENCE,
    apply,
    claim,
    claim_one,
    completed,
    crash,
    enqueue,
    failed,
    ids,
    job,
    recover,
    retried,
    state,
    status,
)


@case(guarantees=(22,))
async def failed_jobs_can_be_retried(harness: Harness, storage: Storage) -> None:
    """`retry` queues failed jobs for one more attempt at least, and touches no other job."""
    await enqueue(storage, job("bad", payload=b"kept", max_attempts=2), job("done"), job("running"))
    bad, done, _ = await claim(storage, 3)
    await apply(storage, failed(bad), completed(done))
    await harness.advance(harness.moment)
    moved = await storage.retry(["bad", "done", "running", "unknown"])
    assert (moved, moved.ids) == (1, ("bad",))
    again = await status(storage, "bad")
    assert (again.state, again.finished_at, again.last_error) == (JobState.QUEUED, None, None)
    assert again.created_at == bad.created_at
    assert await storage.result("bad") is None
    held = await claim_one(storage)
    assert (held.job_id, held.payload, held.max_attempts) == ("bad", b"kept", 2)
    assert held.attempt == again.attempt + 1
    assert await storage.retry([]) == 0


@case(guarantees=(22,), needs=(FRESH_RETRIES,))
async def a_retry_gives_fresh_attempts(storage: Storage) -> None:
    """A job whose attempts were used up has as many again after `retry`."""
    await enqueue(storage, job("job", max_attempts=2))
    for _ in range(2):
        await apply(storage, retried(await claim_one(storage)))
        await apply(storage, failed(held := await claim_one(storage)))
        assert (held.attempt, held.max_attempts) == (2, 2)
        assert await storage.retry(["job"]) == 1
        assert (await status(storage, "job")).attempt == 0


@case(guarantees=(4, 22))
async def a_retried_job_has_no_past(harness: Harness, storage: Storage) -> None:
    """Lost leases and uncounted retries from before an operator's `retry` do not count against the job."""
    await enqueue(storage, job("job", max_attempts=9))
    for made in (0, 0 if harness.capabilities.fresh_retries else 1):
        for _ in range(UNCOUNTED_RETRIES // 2 + 1):
            await apply(storage, retried(await claim_one(storage), counted=False))
        for _ in range(2):
            await crash(harness, storage)
            assert (await recover(harness, storage, 1, max_stalls=2)).requeued == ("job",)
        held = await claim_one(storage)
        assert (held.attempt, held.stalled) == (made + 3, None)
        await apply(storage, failed(held))
        assert await storage.retry(["job"]) == 1


@case(guarantees=(2, 22))
async def jobs_can_be_removed(storage: Storage) -> None:
    """`remove` leaves no trace of any job that is not processing, and its id is free."""
    await enqueue(storage, *(job(name) for name in ("done", "bad", "failing", "running")))
    done, bad, failing, _ = await claim(storage, 4)
    await apply(storage, completed(done), failed(bad), retried(failing, HOUR))
    await enqueue(storage, job("queued"), job("scheduled", delay=HOUR))
    names = ["done", "bad", "failing", "queued", "scheduled"]
    assert await storage.remove([*names, "running", "unknown"]) == 5
    assert await storage.status(names) == [None] * 5
    assert await storage.result("done") is None
    assert await state(storage, "running") is JobState.PROCESSING
    await enqueue(storage, *(job(name) for name in names))
    assert sorted(ids(await claim(storage, 10))) == sorted(names)


@case(guarantees=(22,))
async def delayed_jobs_can_be_promoted(storage: Storage) -> None:
    """`promote` makes scheduled and failing jobs due now, and no others."""
    await enqueue(storage, job("failing"))
    await apply(storage, retried(await claim_one(storage), HOUR))
    await enqueue(storage, job("scheduled", delay=HOUR), job("queued"), job("later", delay=HOUR))
    assert await storage.promote(["failing", "scheduled", "queued", "unknown"]) == 2
    assert await state(storage, "scheduled") is JobState.QUEUED
    claims = {held.job_id: held.attempt for held in await claim(storage, 10)}
    assert claims == {"failing": 2, "scheduled": 1, "queued": 1}


@case(guarantees=(22,))
async def a_queue_can_be_drained(storage: Storage) -> None:
    """`drain` removes every waiting job; running and finished ones stay."""
    await enqueue(storage, job("failing"), job("running"), job("done"))
    failing, running, done = await claim(storage, 3)
    await apply(storage, retried(failing, HOUR), completed(done))
    await enqueue(storage, job("queued"), job("prioritised", priority=2), job("scheduled", delay=HOUR))
    assert await storage.drain() == 4
    assert await claim(storage, 10) == []
    await apply(storage, completed(running))
    counts = await storage.counts()
    assert {state: number for state, number in counts.items() if number} == {JobState.COMPLETED: 2}


@case(guarantees=(15, 22), needs=(ORDERING_KEYS,))
async def draining_forgets_ordering_keys(storage: Storage) -> None:
    """After a drain an ordering key is as free as before its first job."""
    await enqueue(storage, *(job(f"old-{number}", ordering_key="key") for number in range(3)))
    held = await claim_one(storage)
    await claim(storage, 5)
    assert await storage.drain() == 2
    await enqueue(storage, job("new", ordering_key="key"))
    assert await claim(storage, 5) == []
    await apply(storage, completed(held))
    assert ids(await claim(storage, 5)) == ["new"]


@case(guarantees=(12, 22))
async def old_records_can_be_cleaned(harness: Harness, storage: Storage) -> None:
    """`clean` removes finished records of one state that are old enough, at most as many as its limit says."""
    await enqueue(storage, *(job(f"done-{number}") for number in range(5)), job("bad"))
    claims = await claim(storage, 6)
    await apply(storage, *(completed(held) for held in claims[:5]), failed(claims[5]))
    assert await storage.clean(JobState.COMPLETED, older_than=HOUR) == 0
    await harness.advance(harness.moment)
    assert await storage.clean(JobState.COMPLETED, older_than=timedelta(0), limit=0) == 0
    assert await storage.clean(JobState.COMPLETED, older_than=timedelta(0), limit=3) == 3
    assert await storage.clean(JobState.COMPLETED, older_than=timedelta(0)) == 2
    counts = await storage.counts()
    assert (counts[JobState.COMPLETED], counts[JobState.FAILED]) == (0, 1)
    assert await storage.clean(JobState.FAILED, older_than=timedelta(0)) == 1


@case(guarantees=(12, 22))
async def records_age_from_their_end(harness: Harness) -> None:
    """`clean` goes by when a job ended, not by when it was enqueued."""
    age = 3 * harness.moment
    clock = asyncio.get_running_loop().time
    async with asyncio.timeout(PATIENCE):
        while True:
            storage = await harness.open()
            await enqueue(storage, job())
            await harness.advance(age)
            ended = clock()
            await apply(storage, completed(await claim_one(storage)))
            cleaned = await storage.clean(JobState.COMPLETED, older_than=age)
            if clock() - ended < age.total_seconds():
                break  # a machine too busy to be that quick has shown nothing, so it tries again
    assert cleaned == 0
    await harness.advance(age)
    assert await storage.clean(JobState.COMPLETED, older_than=age) == 1
