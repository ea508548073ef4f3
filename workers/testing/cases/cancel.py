"""The promises of `cancel`."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta

from workers.errors import LossReason, StorageUnavailable
from workers.jobs import DROP, CancelResult, JobEventKind, JobOutcome, JobState, OutcomeKind, SettleStatus
from workers.storage.base import Storage
from workers.testing.case import ORDERING_KEYS, OUTSIDE_ENDINGS, RETENTION_PER_JOB, case
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
    settle,
    state,
    status,
    stopped,
)

CANCELLED = JobOutcome(kind=OutcomeKind.CANCELLED)
SETTLED = SettleStatus.ALREADY_APPLIED


@case(guarantees=(7,))
async def a_waiting_job_never_runs(storage: Storage) -> None:
    """A queued, prioritised, scheduled or failing job that was cancelled is so, and its outcome says it."""
    await enqueue(storage, job("failing"))
    await apply(storage, retried(await claim_one(storage), HOUR))
    await enqueue(storage, job("queued"), job("prioritised", priority=5), job("scheduled", delay=HOUR))
    for job_id in ("failing", "queued", "prioritised", "scheduled"):
        assert await storage.cancel(job_id) is CancelResult.CANCELLED
        assert await state(storage, job_id) is JobState.CANCELLED
        assert await storage.result(job_id) == CANCELLED
    assert await storage.promote(["failing", "scheduled"]) == 0
    assert await claim(storage, 10) == []


@case(guarantees=(7,))
async def a_delayed_job_stays_cancelled_when_due(harness: Harness, storage: Storage) -> None:
    """A cancelled job does not come back when its delay is over."""
    await enqueue(storage, job("soon", delay=harness.moment))
    assert await storage.cancel("soon") is CancelResult.CANCELLED
    await harness.advance(harness.moment)
    assert await claim(storage, 10) == []


@case(guarantees=(7, 22))
async def there_may_be_nothing_to_cancel(storage: Storage) -> None:
    """Cancelling distinguishes unknown, completed, failed and cancelled jobs, and changes none of them."""
    await enqueue(storage, job("done"), job("bad"), job("gone"))
    done, bad = await claim(storage, 2)
    await apply(storage, completed(done, b"1"), failed(bad))
    assert await storage.cancel("gone") is CancelResult.CANCELLED
    before = await status(storage, "gone")
    assert await storage.cancel("gone") is CancelResult.CANCELLED
    assert await status(storage, "gone") == before
    assert await storage.cancel("unknown") is CancelResult.NOT_FOUND
    assert await storage.cancel("done") is CancelResult.COMPLETED
    assert await storage.cancel("bad") is CancelResult.FAILED
    assert await storage.result("done") == JobOutcome(kind=OutcomeKind.COMPLETED, result=b"1")
    assert await state(storage, "bad") is JobState.FAILED


@case(guarantees=(7,))
async def a_running_job_is_asked_to_stop(storage: Storage, other: Storage) -> None:
    """For a running job the request is recorded and reported by every renewal, until the attempt is settled."""
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


@case(guarantees=(7, 20, 21))
async def a_running_job_that_stops_is_cancelled(storage: Storage, other: Storage) -> None:
    """A worker that did as it was asked leaves a cancelled job, told to subscribers; nobody can settle it again."""
    await enqueue(storage, job("job"), job("bystander"))
    held, bystander = await claim(storage, 2)
    assert await other.cancel("job") is CancelResult.PROCESSING
    async with other.subscribe("job") as events:
        await apply(storage, stopped(held))
        await expect(events, JobEventKind.CANCELLED)
    found = await status(storage, "job")
    assert (found.state, found.attempt, found.worker_id) == (JobState.CANCELLED, 1, None)
    assert await storage.result("job") == CANCELLED
    assert [(await settle(storage, end(held))).status for end in (stopped, completed)] == [SETTLED] * 2
    assert await storage.cancel("job") is CancelResult.CANCELLED
    assert dict((await storage.renew([held, bystander])).lost) == {held.token: LossReason.COMPLETED}
    assert await claim(storage) == []


@case(guarantees=(7, 21))
async def a_cancelled_job_is_told_with_its_time(harness: Harness, storage: Storage) -> None:
    """`status` tells when a job was cancelled and what its attempts had come to; `counts` and `list` know it."""
    await enqueue(storage, job("waiting", name="alpha", max_attempts=5), job("failing"), job("running"), job("bad"))
    waiting, failing, running, bad = await claim(storage, 4)
    await apply(storage, released(waiting), retried(failing, HOUR), failed(bad))
    await harness.advance(harness.moment)
    before = harness.now()
    for name in ("waiting", "failing", "running"):
        await storage.cancel(name)
    await apply(storage, stopped(running))
    found = {name: await status(storage, name) for name in ("waiting", "failing", "running")}
    assert {name: one.attempt for name, one in found.items()} == {"waiting": 0, "failing": 1, "running": 1}
    assert (found["waiting"].name, found["waiting"].max_attempts, found["waiting"].next_run_at) == ("alpha", 5, None)
    assert found["waiting"].created_at == waiting.created_at
    for one in found.values():
        assert one.finished_at is not None
        assert abs((one.finished_at - before).total_seconds()) < 5
    counts = await storage.counts()
    assert (counts[JobState.CANCELLED], counts[JobState.FAILED]) == (3, 1)
    page = await storage.list(JobState.CANCELLED)
    assert {one.id: one for one in page.jobs} == found
    assert [one.id for one in (await storage.list(JobState.FAILED)).jobs] == ["bad"]


@case(guarantees=(7, 21))
async def cancelled_jobs_are_listed_in_pages(storage: Storage) -> None:
    """Pages of cancelled jobs, and of failed ones beside them, hold every one of them exactly once."""
    names = {kind: {f"{kind}-{number}" for number in range(9)} for kind in ("failed", "cancelled")}
    await enqueue(storage, *map(job, names["failed"]))
    await apply(storage, *map(failed, await claim(storage, 9)))
    await enqueue(storage, *map(job, names["cancelled"]))
    for name in names["cancelled"]:
        await storage.cancel(name)
    for wanted in (JobState.FAILED, JobState.CANCELLED):
        listed: list[str] = []
        page = await storage.list(wanted, limit=4)
        while page.cursor is not None:
            assert len(page.jobs) <= 4
            listed += [found.id for found in page.jobs]
            page = await storage.list(wanted, cursor=page.cursor, limit=4)
        listed += [found.id for found in page.jobs]
        assert sorted(listed) == sorted(names[wanted])


@case(guarantees=(15,), needs=(ORDERING_KEYS,))
async def a_stopped_job_frees_its_ordering_key(storage: Storage) -> None:
    """When a running job has been stopped, the next one of its ordering key runs."""
    await enqueue(storage, job("first", ordering_key="key"), job("second", ordering_key="key"))
    held = await claim_one(storage)
    assert await claim(storage) == []
    await storage.cancel("first")
    await apply(storage, stopped(held))
    assert (await claim_one(storage)).job_id == "second"


@case(guarantees=(7, 22))
async def a_cancelled_job_can_be_retried(harness: Harness, storage: Storage) -> None:
    """`retry` queues cancelled jobs with their payload for one more attempt at least; they are cancelled no more."""
    await enqueue(storage, job("waiting", payload=b"kept", max_attempts=2), job("running", priority=1))
    await apply(storage, retried(await claim_one(storage), HOUR))
    running = await claim_one(storage)
    for name in ("waiting", "running"):
        await storage.cancel(name)
    await apply(storage, stopped(running))
    assert await storage.retry(["waiting", "running"]) == 2
    again = await status(storage, "waiting")
    made = 0 if harness.capabilities.fresh_retries else 1
    assert (again.state, again.attempt, again.finished_at, again.last_error) == (JobState.QUEUED, made, None, None)
    assert (await storage.counts())[JobState.CANCELLED] == 0
    claims = {held.job_id: held for held in await claim(storage, 5)}
    kept = claims["waiting"]
    assert (kept.payload, kept.attempt, kept.max_attempts) == (b"kept", made + 1, 2)
    assert (await storage.renew(list(claims.values()))).cancel_requested == set()
    await apply(storage, *map(failed, claims.values()))
    assert [await state(storage, name) for name in claims] == [JobState.FAILED] * 2


@case(guarantees=(7, 22))
async def cancelled_records_are_cleared_away(harness: Harness, storage: Storage) -> None:
    """`clean` takes cancelled records apart from failed ones, `remove` takes them as any other."""
    await enqueue(storage, job("bad"))
    await apply(storage, failed(await claim_one(storage)))
    names = ("first", "second", "third")
    await enqueue(storage, *map(job, names))
    for name in names:
        await storage.cancel(name)
    await harness.advance(harness.moment)
    assert await storage.remove(["third"]) == 1
    assert await storage.clean(JobState.CANCELLED, older_than=HOUR) == 0
    assert await storage.clean(JobState.CANCELLED, older_than=timedelta(0), limit=1) == 1
    assert (await storage.counts())[JobState.CANCELLED] == 1
    assert await storage.clean(JobState.FAILED, older_than=timedelta(0)) == 1
    assert await storage.clean(JobState.CANCELLED, older_than=timedelta(0)) == 1
    assert set((await storage.counts()).values()) == {0}


@case(guarantees=(6,), needs=(RETENTION_PER_JOB,))
async def a_cancelled_record_lasts_as_a_failed_one(harness: Harness, storage: Storage) -> None:
    """The record goes when the retention of a failure is over, also of a job that was stopped, or as its stop said."""
    names = ("stopped", "longer", "waiting")
    short = [job(name, keep_completed=HOUR, keep_failed=harness.moment) for name in names]
    await enqueue(storage, *short[:2])
    claims = await claim(storage, 2)
    await enqueue(storage, short[2], job("long", keep_completed=harness.moment))
    for name in ("stopped", "longer", "waiting", "long"):
        await storage.cancel(name)
    await apply(storage, stopped(claims[0]), stopped(claims[1], keep=HOUR))
    await harness.advance(harness.moment)
    async with asyncio.timeout(PATIENCE):
        while await storage.status(["stopped", "waiting"]) != [None, None]:
            await harness.advance(harness.moment)
    assert (await storage.result("stopped"), await storage.result("waiting")) == (None, None)
    assert (await storage.counts())[JobState.CANCELLED] == 2
    assert [await storage.result(name) for name in ("longer", "long")] == [CANCELLED] * 2


@case(guarantees=(7, 12, 20))
async def a_cancelled_job_may_leave_nothing(storage: Storage) -> None:
    """One that keeps no record of a failure keeps none of a cancel; who waits for it is told all the same."""
    await enqueue(storage, job("running", keep_failed=DROP))
    held = await claim_one(storage)
    await enqueue(storage, job("waiting", keep_failed=DROP))
    async with storage.subscribe("waiting") as events:
        assert await storage.cancel("waiting") is CancelResult.CANCELLED
        await expect(events, JobEventKind.CANCELLED)
    async with storage.subscribe("running") as events:
        await apply(storage, stopped(held))
        await expect(events, JobEventKind.CANCELLED)
    assert await storage.status(["running", "waiting"]) == [None, None]
    assert set((await storage.counts()).values()) == {0}
    assert await claim(storage, 5) == []


@case(guarantees=(7, 20))
async def a_request_is_told_at_once(storage: Storage, other: Storage) -> None:
    """A worker that listens for cancel requests hears of one for a running job, and of nothing else."""
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
async def a_flood_of_requests_loses_none_in_silence(storage: Storage, other: Storage) -> None:
    """A worker that does not read meanwhile hears of each of 1,200 requests, or that it may have missed some."""
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
async def a_request_outlives_a_crash(harness: Harness, storage: Storage) -> None:
    """A request that a worker could not act on, because it died, is reported to the worker that takes over."""
    await enqueue(storage, job("job"))
    held = await claim_one(storage, lease=harness.moment)
    assert await storage.cancel("job") is CancelResult.PROCESSING
    await harness.advance(harness.moment)
    await recover(harness, storage, 1)
    again = await claim_one(storage)
    assert again.token != held.token
    assert (await storage.renew([again])).cancel_requested == {again.token}


@case(guarantees=(7,))
async def a_request_ends_with_the_attempt(storage: Storage) -> None:
    """A request ends with its attempt: the next attempt of a released or retried job is not asked to cancel."""
    await enqueue(storage, job("job"))
    for end in (released, retried):
        held = await claim_one(storage)
        assert await storage.cancel("job") is CancelResult.PROCESSING
        await apply(storage, end(held))
        again = await claim_one(storage)
        assert (await storage.renew([again])).cancel_requested == set()
        await apply(storage, released(again))


@case(guarantees=(2, 7))
async def a_cancelled_id_starts_a_new_generation(storage: Storage) -> None:
    """A cancelled id may be enqueued again, runs, and is no longer remembered as cancelled."""
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
async def cancel_and_claim_never_both_win(storage: Storage, other: Storage) -> None:
    """When cancels and claims of 60 jobs race, each job runs or is cancelled, and the canceller knows which."""
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
async def waiters_are_told_at_once(storage: Storage, other: Storage) -> None:
    """Every waiter of a cancelled job gets the event and can read the outcome."""
    await enqueue(storage, job("job"))
    async with storage.subscribe("job") as first, other.subscribe("job") as second:
        await other.cancel("job")
        for waiter in (first, second):
            await expect(waiter, JobEventKind.CANCELLED)
    assert await storage.result("job") == CANCELLED
