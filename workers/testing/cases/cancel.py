"""The promises of `cancel`."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from workers.errors import StorageUnavailable
from workers.jobs import CancelResult, JobEventKind, JobOutcome, JobState, OutcomeKind
from workers.testing.case import OUTSIDE_ENDINGS, case
from workers.testing.harness import Harness
from workers.testing.steps import (
    HOUR,
    PATIENCE,
    apply,
    claim,
    claim_one,
    completed,
    dropped,
    enqueue,
    expect,
    failed,
    job,
    recover,
    released,
    retried,
    state,
)

CANCELLED = JobOutcome(kind=OutcomeKind.CANCELLED)


@case(guarantees=(7,))
async def a_waiting_job_never_runs(harness: Harness) -> None:
    """A queued, prioritised, scheduled or failing job that was cancelled is gone, and its outcome says cancelled."""
    storage = await harness.open()
    await enqueue(storage, job("failing"))
    await apply(storage, retried(await claim_one(storage), HOUR))
    await enqueue(storage, job("queued"), job("prioritised", priority=5), job("scheduled", delay=HOUR))
    for job_id in ("failing", "queued", "prioritised", "scheduled"):
        assert await storage.cancel(job_id) is CancelResult.CANCELLED
        assert await state(storage, job_id) is None
        assert await storage.result(job_id) == CANCELLED
    assert await storage.promote(["failing", "scheduled"]) == 0
    assert await claim(storage, 10) == []


@case(guarantees=(7,))
async def a_delayed_job_stays_cancelled_when_due(harness: Harness) -> None:
    """A cancelled job does not come back when its delay is over."""
    storage = await harness.open()
    await enqueue(storage, job("soon", delay=harness.moment))
    assert await storage.cancel("soon") is CancelResult.CANCELLED
    await harness.advance(harness.moment)
    assert await claim(storage, 10) == []


@case(guarantees=(7, 22))
async def there_may_be_nothing_to_cancel(harness: Harness) -> None:
    """Cancelling distinguishes unknown, completed, failed and already cancelled jobs, and changes none of them."""
    storage = await harness.open()
    await enqueue(storage, job("done"), job("bad"), job("gone"))
    done, bad = await claim(storage, 2)
    await apply(storage, completed(done, b"1"), failed(bad))
    assert await storage.cancel("gone") is CancelResult.CANCELLED
    assert await storage.cancel("gone") is CancelResult.NOT_FOUND
    assert await storage.cancel("unknown") is CancelResult.NOT_FOUND
    assert await storage.cancel("done") is CancelResult.COMPLETED
    assert await storage.cancel("bad") is CancelResult.FAILED
    assert await storage.result("done") == JobOutcome(kind=OutcomeKind.COMPLETED, result=b"1")
    assert await state(storage, "bad") is JobState.FAILED


@case(guarantees=(7,))
async def a_running_job_is_asked_to_stop(harness: Harness) -> None:
    """For a running job the request is recorded and reported by every renewal, until the attempt is settled."""
    storage = await harness.open()
    other = await harness.open(storage.queue)
    await enqueue(storage, job("running"), job("bystander"))
    running, bystander = await claim(storage, 2)
    assert await other.cancel("running") is CancelResult.PROCESSING
    for _ in range(2):
        renewal = await storage.renew([running, bystander])
        assert renewal.cancel_requested == {running.token}
        assert dict(renewal.lost) == {}
    assert await state(storage, "running") is JobState.PROCESSING
    await apply(storage, completed(running, b"finished anyway"))
    assert await storage.result("running") == JobOutcome(kind=OutcomeKind.COMPLETED, result=b"finished anyway")


@case(guarantees=(7, 20))
async def a_request_is_told_at_once(harness: Harness) -> None:
    """A worker that listens for cancel requests hears of one for a running job, and of nothing else."""
    storage = await harness.open()
    other = await harness.open(storage.queue)
    async with storage.cancel_requests() as requests, storage.cancel_requests() as others_too:
        await enqueue(other, job("waiting"), job("running"), job("done"))
        assert await other.cancel("waiting") is CancelResult.CANCELLED
        running, done = await claim(storage, 2)
        await apply(storage, completed(done))
        assert await other.cancel("running") is CancelResult.PROCESSING
        for heard in (requests, others_too):
            assert (await expect(heard, JobEventKind.CANCEL_REQUESTED))[0].job_id == "running"
        assert (await storage.renew([running])).cancel_requested == {running.token}


@case(guarantees=(7,), needs=(OUTSIDE_ENDINGS,))
async def a_flood_of_requests_loses_none_in_silence(harness: Harness) -> None:
    """A worker that does not read meanwhile hears of each of 1,200 requests, or that it may have missed some."""
    storage = await harness.open()
    other = await harness.open(storage.queue)
    names = {f"job-{number}" for number in range(1_200)}
    await enqueue(storage, *map(job, names))
    assert len(await claim(storage, len(names))) == len(names)
    async with storage.cancel_requests() as requests:
        assert await other.remove(list(names), running=True) == len(names)
        async with asyncio.timeout(PATIENCE):
            with suppress(StorageUnavailable):
                while names:
                    names.discard((await requests.get()).job_id)


@case(guarantees=(7,))
async def a_request_outlives_a_crash(harness: Harness) -> None:
    """A request that a worker could not act on, because it died, is reported to the worker that takes over."""
    storage = await harness.open()
    await enqueue(storage, job("job"))
    held = await claim_one(storage, lease=harness.moment)
    assert await storage.cancel("job") is CancelResult.PROCESSING
    await harness.advance(harness.moment)
    await recover(harness, storage, 1)
    again = await claim_one(storage)
    assert again.token != held.token
    assert (await storage.renew([again])).cancel_requested == {again.token}


@case(guarantees=(7,))
async def a_request_ends_with_the_attempt(harness: Harness) -> None:
    """A request ends with its attempt: the next attempt of a released or retried job is not asked to cancel."""
    storage = await harness.open()
    await enqueue(storage, job("job"))
    for end in (released, retried):
        held = await claim_one(storage)
        assert await storage.cancel("job") is CancelResult.PROCESSING
        await apply(storage, end(held))
        again = await claim_one(storage)
        assert (await storage.renew([again])).cancel_requested == set()
        await apply(storage, released(again))


@case(guarantees=(2, 7))
async def a_cancelled_id_starts_a_new_generation(harness: Harness) -> None:
    """A cancelled id may be enqueued again, runs, and is no longer remembered as cancelled."""
    storage = await harness.open()
    await enqueue(storage, job("again", payload=b"old"))
    await storage.cancel("again")
    await enqueue(storage, job("again", payload=b"new"))
    assert await storage.result("again") is None
    held = await claim_one(storage)
    assert (held.payload, held.attempt) == (b"new", 1)
    await apply(storage, dropped(held))
    assert await storage.result("again") is None
    assert await claim(storage, 5) == []


@case(guarantees=(7,))
async def cancel_and_claim_never_both_win(harness: Harness) -> None:
    """When cancels and claims of 60 jobs race, each job runs or is cancelled, and the canceller knows which."""
    storage = await harness.open()
    other = await harness.open(storage.queue)
    names = [f"job-{number}" for number in range(60)]
    await enqueue(storage, *(job(name) for name in names))

    async def claim_all() -> set[str]:
        claimed: set[str] = set()
        while held := await claim(storage, 4):
            claimed |= {one.job_id for one in held}
            await asyncio.sleep(0)
        return claimed

    async def cancel_all() -> dict[str, CancelResult]:
        answers: dict[str, CancelResult] = {}
        for name in reversed(names):
            answers[name] = await other.cancel(name)
            await asyncio.sleep(0)
        return answers

    claimed, answers = await asyncio.gather(claim_all(), cancel_all())
    cancelled = {name for name, answer in answers.items() if answer is CancelResult.CANCELLED}
    assert set(answers.values()) <= {CancelResult.CANCELLED, CancelResult.PROCESSING}
    assert not claimed & cancelled
    assert claimed | cancelled == set(names)


@case(guarantees=(7, 20))
async def waiters_are_told_at_once(harness: Harness) -> None:
    """Every waiter of a cancelled job gets the event and can read the outcome."""
    storage = await harness.open()
    other = await harness.open(storage.queue)
    await enqueue(storage, job("job"))
    async with storage.subscribe("job") as first, other.subscribe("job") as second:
        await other.cancel("job")
        for waiter in (first, second):
            await expect(waiter, JobEventKind.CANCELLED)
    assert await storage.result("job") == CANCELLED
