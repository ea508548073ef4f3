"""The promises of `settle`."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from workers.errors import LossReason
from workers.jobs import (
    DROP,
    Completed,
    JobOutcome,
    JobState,
    OutcomeKind,
    Settlement,
    SettleOutcome,
    SettleStatus,
)
from workers.storage.base import Storage
from workers.testing.case import ATOMIC_CONTINUATION, case
from workers.testing.harness import Harness
from workers.testing.steps import (
    ERROR,
    HOUR,
    apply,
    background,
    claim,
    claim_one,
    completed,
    crash,
    dropped,
    enqueue,
    failed,
    job,
    recover,
    released,
    retried,
    settle,
    state,
    status,
)

APPLIED = SettleOutcome(status=SettleStatus.APPLIED)
TAKEN = SettleOutcome(status=SettleStatus.LOST, reason=LossReason.TAKEN)
ALREADY_COMPLETED = SettleOutcome(status=SettleStatus.LOST, reason=LossReason.COMPLETED)
NOT_FOUND = SettleOutcome(status=SettleStatus.LOST, reason=LossReason.NOT_FOUND)


@case(guarantees=(6,))
async def completing_stores_the_result(storage: Storage, other: Storage) -> None:
    """A completed job has its result, its end and no next run; every client sees it."""
    await enqueue(storage, job("done"))
    assert await settle(storage, completed(await claim_one(storage), b'"ok"')) == APPLIED
    assert await other.result("done") == JobOutcome(kind=OutcomeKind.COMPLETED, result=b'"ok"')
    done = await status(other, "done")
    assert (done.state, done.attempt, done.last_error) == (JobState.COMPLETED, 1, None)
    assert (done.worker_id, done.next_run_at) == (None, None)
    assert done.finished_at is not None
    assert done.finished_at >= done.created_at


@case(guarantees=(21,))
async def failing_stores_the_error(storage: Storage) -> None:
    """A failed job has its error with type, message and stack, and is not claimed again."""
    await enqueue(storage, job("bad"))
    assert await settle(storage, failed(await claim_one(storage))) == APPLIED
    assert await storage.result("bad") == JobOutcome(kind=OutcomeKind.FAILED, error=ERROR)
    gone_wrong = await status(storage, "bad")
    assert (gone_wrong.state, gone_wrong.last_error) == (JobState.FAILED, ERROR)
    assert gone_wrong.finished_at is not None
    assert await claim(storage) == []


@case(guarantees=(16, 21))
async def a_retry_waits_for_its_delay(harness: Harness, storage: Storage) -> None:
    """A retried job is failing, with its error and next run, until it is due; then it is queued."""
    await enqueue(storage, job("later"), job("soon"))
    later, soon = await claim(storage, 2)
    await apply(storage, retried(later, HOUR), retried(soon, harness.moment))
    failing = await status(storage, "later")
    assert (failing.state, failing.attempt, failing.last_error) == (JobState.FAILING, 1, ERROR)
    assert failing.next_run_at is not None
    assert abs((failing.next_run_at - harness.now() - HOUR).total_seconds()) < 60
    assert await storage.result("later") is None
    await harness.advance(harness.moment)
    assert await state(storage, "soon") is JobState.QUEUED
    assert [(held.job_id, held.attempt) for held in await claim(storage, 5)] == [("soon", 2)]


@case(guarantees=(16, 23, 24))
async def any_duration_can_be_settled(storage: Storage) -> None:
    """Delays and retentions beyond every calendar, or below zero, end their attempt and do not harm its neighbours."""
    await enqueue(storage, *(job(name) for name in ("never", "past", "for ever", "neighbour")))
    never, past, for_ever, neighbour = await claim(storage, 4)
    await apply(
        storage,
        retried(never, timedelta.max),
        retried(past, -HOUR),
        completed(for_ever, b"1", keep=timedelta.max),
        completed(neighbour, b"2"),
    )
    assert await state(storage, "never") is JobState.FAILING
    assert (await claim_one(storage)).job_id == "past"
    assert await state(storage, "for ever") is JobState.COMPLETED
    assert await state(storage, "neighbour") is JobState.COMPLETED


@case(guarantees=(21,))
async def the_last_error_is_remembered(storage: Storage) -> None:
    """The error of a failed attempt can be read until another one replaces it, through a release and a run."""
    await enqueue(storage, job("again"))
    await apply(storage, retried(await claim_one(storage)))
    await apply(storage, released(await claim_one(storage)))
    assert (await status(storage, "again")).last_error == ERROR
    await claim_one(storage)
    assert (await status(storage, "again")).last_error == ERROR


@case(guarantees=(16,))
async def a_retry_without_delay_is_queued(storage: Storage) -> None:
    """A job retried with no delay reads as queued and can be claimed at once."""
    await enqueue(storage, job("again"))
    await apply(storage, retried(await claim_one(storage)))
    assert await state(storage, "again") is JobState.QUEUED
    assert (await claim_one(storage)).attempt == 2


@case(guarantees=(3, 23))
async def outcomes_keep_the_order_of_the_batch(storage: Storage) -> None:
    """A mixed batch is answered element by element, and a lost one never stops its neighbours."""
    await enqueue(storage, job("job-1"))
    stale = await claim_one(storage)
    await apply(storage, released(stale))
    assert (await claim_one(storage)).job_id == "job-1"
    await enqueue(storage, job("gone"))
    gone = await claim_one(storage)
    await apply(storage, dropped(gone))
    await enqueue(storage, *(job(f"job-{number}") for number in (0, 2, 3)))
    first, third, fourth = await claim(storage, 3)
    outcomes = await storage.settle(
        [
            completed(first, b"1"),
            failed(stale),
            retried(third, HOUR),
            completed(gone),
            failed(fourth),
        ]
    )
    assert outcomes == [APPLIED, TAKEN, APPLIED, NOT_FOUND, APPLIED]
    states = [found.state if found else None for found in await storage.status([f"job-{n}" for n in range(4)])]
    assert states == [JobState.COMPLETED, JobState.PROCESSING, JobState.FAILING, JobState.FAILED]
    assert await storage.settle([]) == []


@case(guarantees=(3,))
async def a_repeated_settle_is_already_applied(storage: Storage) -> None:
    """Settling again with the same token, as after a lost reply, changes nothing and is reported as such."""
    await enqueue(storage, *(job(f"job-{number}") for number in range(4)))
    first, second, third, fourth = await claim(storage, 4)
    batch: list[Settlement] = [completed(first, b"1"), failed(second), retried(third, HOUR), released(fourth)]
    assert await storage.settle(batch) == [APPLIED] * 4
    before = await storage.status([f"job-{number}" for number in range(4)])
    assert await storage.settle(batch) == [SettleOutcome(status=SettleStatus.ALREADY_APPLIED)] * 4
    assert await storage.status([f"job-{number}" for number in range(4)]) == before


@case(guarantees=(3,))
async def a_terminal_state_is_immutable(storage: Storage) -> None:
    """Nothing that a claim settles after the end changes the result, whichever end came first."""
    await enqueue(storage, job("done"), job("bad"))
    done, bad = await claim(storage, 2)
    await apply(storage, completed(done, b"first"), failed(bad))
    await storage.settle([failed(done), completed(bad), retried(done), released(bad)])
    assert await storage.result("done") == JobOutcome(kind=OutcomeKind.COMPLETED, result=b"first")
    assert await storage.result("bad") == JobOutcome(kind=OutcomeKind.FAILED, error=ERROR)
    assert await claim(storage, 5) == []


@case(guarantees=(3,))
async def an_old_token_has_no_effect(harness: Harness, storage: Storage) -> None:
    """After a recovery nothing that the first claim settles has an effect, not even within the same worker."""
    await enqueue(storage, job("job"))
    (old,) = await crash(harness, storage, worker_id="same")
    await recover(harness, storage, 1)
    for late in (completed(old, b"late"), failed(old), retried(old), released(old)):
        assert await settle(storage, late) == TAKEN
    held = await claim_one(storage, worker_id="same")
    assert held.attempt == 2
    for late in (completed(old, b"late"), failed(old), retried(old), released(old)):
        assert await settle(storage, late) == TAKEN
    assert await state(storage, "job") is JobState.PROCESSING
    await apply(storage, completed(held, b"right"))
    assert await settle(storage, completed(old, b"late")) == ALREADY_COMPLETED
    assert await storage.result("job") == JobOutcome(kind=OutcomeKind.COMPLETED, result=b"right")


@case(guarantees=(3,))
async def an_old_token_is_nothing_to_a_new_generation(storage: Storage) -> None:
    """A token of a failed generation cannot settle the next one."""
    await enqueue(storage, job("job"))
    old = await claim_one(storage)
    await apply(storage, failed(old))
    await enqueue(storage, job("job"))
    held = await claim_one(storage)
    assert await settle(storage, completed(old, b"late")) == TAKEN
    await apply(storage, completed(held, b"right"))
    assert await storage.result("job") == JobOutcome(kind=OutcomeKind.COMPLETED, result=b"right")


@case(guarantees=(18,))
async def a_late_settle_that_nobody_overtook_counts(harness: Harness, storage: Storage) -> None:
    """A lease that ran out does not void the work as long as no reaper has recovered the job."""
    await enqueue(storage, job("late"))
    (held,) = await crash(harness, storage)
    await apply(storage, completed(held, b"late"))
    for _ in range(harness.capabilities.recovery_passes + 1):
        assert (await storage.recover(100)).requeued == ()
    assert await state(storage, "late") is JobState.COMPLETED


@case(guarantees=(3,))
async def concurrent_settles_apply_once(storage: Storage, other: Storage) -> None:
    """Of 20 settlements of one claim at the same time on two clients, exactly one applies."""
    await enqueue(storage, job("job"))
    held = await claim_one(storage)
    outcomes = await asyncio.gather(
        *(settle((storage, other)[n % 2], completed(held, f"{n}".encode())) for n in range(20))
    )
    statuses = [outcome.status for outcome in outcomes]
    assert statuses.count(SettleStatus.APPLIED) == 1
    assert statuses.count(SettleStatus.ALREADY_APPLIED) == 19
    winner = f"{statuses.index(SettleStatus.APPLIED)}".encode()
    assert await storage.result("job") == JobOutcome(kind=OutcomeKind.COMPLETED, result=winner)


@case(guarantees=(6, 12))
async def a_dropped_job_leaves_nothing(storage: Storage) -> None:
    """A job completed with `DROP` is gone in the same step, and its token finds nothing."""
    await enqueue(storage, job("gone"))
    held = await claim_one(storage)
    await apply(storage, dropped(held))
    assert await state(storage, "gone") is None
    assert await storage.result("gone") is None
    assert await settle(storage, completed(held)) == NOT_FOUND


@case(guarantees=(6,))
async def a_continuation_comes_with_the_completion(storage: Storage) -> None:
    """`then` is enqueued when the job completes, once, even if the settle is repeated or the record dropped."""
    for keep in (None, DROP):
        await enqueue(storage, job(f"first {keep}"))
        then = job(f"second {keep}", payload=b"next")
        step = Completed(claim=await claim_one(storage), result=b"1", keep=keep, then=then)
        await apply(storage, step)
        assert await state(storage, f"first {keep}") is (JobState.COMPLETED if keep is None else None)
        await storage.settle([step])
        (held,) = await claim(storage, 5)
        assert (held.job_id, held.payload) == (then.id, b"next")
        await apply(storage, completed(held))


@case(guarantees=(3, 6), needs=(ATOMIC_CONTINUATION,))
async def a_lost_completion_continues_nothing(harness: Harness, storage: Storage) -> None:
    """A completion that comes too late enqueues no continuation."""
    await enqueue(storage, job("first"))
    (old,) = await crash(harness, storage)
    await recover(harness, storage, 1)
    assert await settle(storage, Completed(claim=old, result=b"1", then=job("second"))) == TAKEN
    assert await state(storage, "second") is None


@case(guarantees=(6,))
async def a_completion_is_seen_whole(harness: Harness, storage: Storage) -> None:
    """A reader who looks while a job completes sees it running, or all of its end: state, result and continuation."""
    reader = await harness.open(storage.queue)
    for number in range(20):
        step = await _last_step(storage, f"first-{number}", f"second-{number}")
        settling = asyncio.create_task(apply(storage, step))
        async with background(settling):
            while not settling.done():
                await _see_whole(reader, step)
                await asyncio.sleep(0)
            await settling
        assert await state(reader, step.claim.job_id) is JobState.COMPLETED
        await _see_whole(reader, step)


@case(guarantees=(6,))
async def a_settle_broken_off_can_be_repeated(storage: Storage) -> None:
    """A completion broken off at any moment was done as a whole or not at all, and repeating it completes it."""
    for number in range(24):
        step = await _last_step(storage, f"first-{number}", f"second-{number}")
        settling = asyncio.create_task(storage.settle([step]))
        for _ in range(number):
            await asyncio.sleep(0 if number < 12 else 0.0001)
        settling.cancel()
        await asyncio.gather(settling, return_exceptions=True)
        await _see_whole(storage, step)
        assert (await settle(storage, step)).status in (SettleStatus.APPLIED, SettleStatus.ALREADY_APPLIED)
        assert await state(storage, step.claim.job_id) is JobState.COMPLETED
        await _see_whole(storage, step)


async def _last_step(storage: Storage, job_id: str, then_id: str) -> Completed:
    """Make a running job, and the settlement that completes it with a continuation for later."""
    await enqueue(storage, job(job_id))
    return Completed(claim=await claim_one(storage), result=b"whole", then=job(then_id, delay=HOUR))


async def _see_whole(storage: Storage, step: Completed) -> None:
    """Check that all of the completion is there if any of it is. What is read second can only be newer."""
    job_id = step.claim.job_id
    outcome = await storage.result(job_id)
    if outcome is None and await state(storage, job_id) is JobState.COMPLETED:
        outcome = await storage.result(job_id)
        assert outcome is not None, "a job is completed and has no result"
    if outcome is not None:
        assert outcome == JobOutcome(kind=OutcomeKind.COMPLETED, result=step.result)
        assert await state(storage, job_id) is JobState.COMPLETED, "a job has its result and is not completed"
        assert step.then is not None
        assert await state(storage, step.then.id) is JobState.SCHEDULED, "a job is completed and not continued"


@case(guarantees=(8,))
async def results_are_told_apart(storage: Storage) -> None:
    """No result yet, an empty result and the result `null` are three different things."""
    await enqueue(storage, job("null"), job("empty"), job("unfinished"))
    null, empty, _ = await claim(storage, 3)
    await apply(storage, completed(null, b"null"), completed(empty, b""))
    assert await storage.result("null") == JobOutcome(kind=OutcomeKind.COMPLETED, result=b"null")
    assert await storage.result("empty") == JobOutcome(kind=OutcomeKind.COMPLETED, result=b"")
    assert await storage.result("unfinished") is None
    assert await storage.result("unknown") is None
    again = await storage.enqueue([job("null"), job("empty")])
    assert [result.result for result in again] == [b"null", b""]
