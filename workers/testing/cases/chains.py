"""The promises of continuing a job, and of ending it from outside."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from workers.errors import LossReason
from workers.jobs import (
    DROP,
    EnqueueStatus,
    Failed,
    JobEventKind,
    JobOutcome,
    JobState,
    OutcomeKind,
    SettleOutcome,
    SettleStatus,
)
from workers.storage.abilities import ContinuesFromOutside
from workers.storage.base import Storage
from workers.testing.case import (
    NAME_FILTER,
    ORDERING_KEYS,
    OUTSIDE_CONTINUATIONS,
    OUTSIDE_ENDINGS,
    PRIORITY_ORDER,
    case,
)
from workers.testing.harness import Harness
from workers.testing.steps import (
    ERROR,
    HOUR,
    LEASE,
    apply,
    background,
    claim,
    claim_one,
    completed,
    continued,
    crash,
    enqueue,
    expect,
    failed,
    ids,
    job,
    next_claim,
    recover,
    retried,
    settle,
    state,
    status,
)

COMPLETED = SettleOutcome(status=SettleStatus.LOST, reason=LossReason.COMPLETED)
NOT_FOUND = SettleOutcome(status=SettleStatus.LOST, reason=LossReason.NOT_FOUND)
TAKEN = SettleOutcome(status=SettleStatus.LOST, reason=LossReason.TAKEN)


@case(guarantees=(6,))
async def a_continued_job_goes_on_as_its_next_link(storage: Storage) -> None:
    """A continued job keeps id and date, gets its next link's content and fresh attempts, and ends like any job."""
    await enqueue(storage, job("chain", name="first", payload=b"1"))
    await apply(storage, retried(await claim_one(storage)))
    first = await claim_one(storage)
    assert (first.attempt, first.chain_index) == (2, 0)
    began = (await status(storage, "chain")).created_at

    await apply(storage, continued(first, name="second", payload=b"2"))

    found = await status(storage, "chain")
    assert (found.name, found.state, found.attempt, found.chain_index) == ("second", JobState.QUEUED, 0, 1)
    assert (found.created_at, found.last_error, found.finished_at) == (began, None, None)
    assert await storage.result("chain") is None
    second = await claim_one(storage)
    assert (second.job_id, second.name, second.payload, second.attempt) == ("chain", "second", b"2", 1)
    assert (second.chain_index, second.created_at) == (1, first.created_at)
    assert second.token != first.token
    await apply(storage, completed(second, b"done"))
    assert await storage.result("chain") == JobOutcome(kind=OutcomeKind.COMPLETED, result=b"done")
    counts = await storage.counts()
    assert sum(counts.values()) == counts[JobState.COMPLETED] == 1


@case(guarantees=(3, 6))
async def continuing_again_changes_nothing(storage: Storage) -> None:
    """A repeated continuation changes nothing and says so; once the next link runs, the old claim has no effect."""
    await enqueue(storage, job("chain"))
    first = await claim_one(storage)
    step = continued(first, payload=b"2")
    await apply(storage, step)
    assert (await settle(storage, step)).status is SettleStatus.ALREADY_APPLIED
    assert (await settle(storage, completed(first))).status is SettleStatus.ALREADY_APPLIED
    second = await claim_one(storage)
    for late in (step, completed(first), failed(first), continued(first, payload=b"other")):
        assert await settle(storage, late) == TAKEN
    assert first.token in (await storage.renew([first, second])).lost
    assert await claim(storage, 5) == []
    await apply(storage, completed(second))


@case(guarantees=(3, 6))
async def a_late_continuation_continues_nothing(harness: Harness, storage: Storage) -> None:
    """A continuation whose lease was lost must not replace the job that another worker holds."""
    await enqueue(storage, job("chain", payload=b"1"))
    (old,) = await crash(harness, storage)
    await recover(harness, storage, 1)
    assert await settle(storage, continued(old, payload=b"2")) == TAKEN
    assert (await claim_one(storage)).payload == b"1"


@case(guarantees=(6, 16))
async def a_continuation_can_wait(harness: Harness, storage: Storage) -> None:
    """A continuation with a delay is scheduled, wakes a worker when it is due, and can be cancelled like any job."""
    await enqueue(storage, job("later"), job("never"))
    for held in await claim(storage, 2):
        delay = harness.moment if held.job_id == "later" else HOUR
        await apply(storage, continued(held, payload=b"2", delay=delay))
        assert await state(storage, held.job_id) is JobState.SCHEDULED
        assert (await status(storage, held.job_id)).next_run_at is not None
    await storage.cancel("never")
    assert await storage.result("never") == JobOutcome(kind=OutcomeKind.CANCELLED)
    await harness.advance(harness.moment)
    assert (await next_claim(storage)).payload == b"2"


@case(guarantees=(6, 19))
async def a_continuation_wakes_waiting_workers(storage: Storage, other: Storage) -> None:
    """A worker that waits for work takes the next link."""
    await enqueue(storage, job("chain"))
    first = await claim_one(storage)
    waiting = asyncio.create_task(next_claim(other))
    async with background(waiting):
        await asyncio.sleep(0)
        await apply(storage, continued(first, payload=b"2"))
        assert (await waiting).payload == b"2"


@case(guarantees=(15,))
async def a_continuation_stands_behind_those_who_wait(storage: Storage) -> None:
    """A continuation queues behind the jobs that wait already, so a long chain does not delay them."""
    await enqueue(storage, job("chain"), job("other"))
    await apply(storage, continued(await claim_one(storage)))
    assert ids(await claim(storage, 2)) == ["other", "chain"]


@case(guarantees=(15,), needs=(PRIORITY_ORDER,))
async def a_continuation_has_a_priority_of_its_own(storage: Storage) -> None:
    """The next link of a chain is claimed by its own priority."""
    await enqueue(storage, job("up", priority=5), job("middle", priority=5), job("down", priority=5))
    for held in await claim(storage, 3):
        if held.job_id == "middle":
            await apply(storage, retried(held))
        else:
            await apply(storage, continued(held, priority=1 if held.job_id == "up" else 9))
    assert ids(await claim(storage, 3)) == ["up", "middle", "down"]


@case(guarantees=(17,), needs=(NAME_FILTER,))
async def a_continuation_is_claimed_by_its_own_name(storage: Storage) -> None:
    """Workers of the first link's name do not get the second link, but those of its own name do."""
    await enqueue(storage, job("chain", name="first"))
    await apply(storage, continued(await claim_one(storage), name="second"))
    assert await storage.claim("w", leases={"first": LEASE}, limit=1) == []
    assert ids(await storage.claim("w", leases={"second": LEASE}, limit=1)) == ["chain"]


@case(guarantees=(15,), needs=(ORDERING_KEYS,))
async def a_continuation_changes_ordering_keys(storage: Storage) -> None:
    """A continuation frees the old ordering key at once and respects the new one."""
    await enqueue(storage, job("chain", ordering_key="a"), job("next of a", ordering_key="a"))
    first = await claim_one(storage)
    await enqueue(storage, job("of b", ordering_key="b"))
    of_b = await claim_one(storage)
    assert of_b.job_id == "of b"
    await apply(storage, continued(first, ordering_key="b"))
    assert ids(await claim(storage, 5)) == ["next of a"]
    await apply(storage, completed(of_b))
    assert ids(await claim(storage, 5)) == ["chain"]


@case(guarantees=(5,))
async def a_continued_job_is_recovered_as_its_link(harness: Harness, storage: Storage) -> None:
    """A crash in the second link repeats the second link, and counts as an attempt of that link."""
    await enqueue(storage, job("chain", max_attempts=5))
    await apply(storage, continued(await claim_one(storage), payload=b"2"))
    await crash(harness, storage)
    await recover(harness, storage, 1)
    again = await claim_one(storage)
    assert (again.payload, again.attempt, again.chain_index) == (b"2", 2, 1)


@case(guarantees=(2,))
async def a_chain_is_one_id(storage: Storage) -> None:
    """While a chain goes on, its id is a duplicate; it ends with its last link's retention."""
    await enqueue(storage, job("chain"))
    await apply(storage, continued(await claim_one(storage), keep=DROP))
    (again,) = await storage.enqueue([job("chain")])
    assert again.status is EnqueueStatus.DUPLICATE
    await apply(storage, completed(await claim_one(storage)))
    assert await state(storage, "chain") is None
    await enqueue(storage, job("chain", payload=b"new"))
    fresh = await claim_one(storage)
    assert (fresh.payload, fresh.chain_index) == (b"new", 0)


@case(guarantees=(2, 6))
async def a_link_may_fail_without_a_record(storage: Storage) -> None:
    """When a link fails with `DROP`, the whole chain is gone, and its id may begin another."""
    await enqueue(storage, job("chain"))
    await apply(storage, continued(await claim_one(storage), payload=b"2"))
    await apply(storage, Failed(claim=await claim_one(storage), error=ERROR, keep=DROP))
    assert (await state(storage, "chain"), await storage.result("chain")) == (None, None)
    await enqueue(storage, job("chain", payload=b"new"))
    fresh = await claim_one(storage)
    assert (fresh.payload, fresh.attempt, fresh.chain_index) == (b"new", 1, 0)


@case(guarantees=(20,))
async def a_chains_waiters_hear_its_end(storage: Storage) -> None:
    """A continuation is no end: subscribers hear that the job is queued again, and later that it has completed."""
    await enqueue(storage, job("chain"))
    first = await claim_one(storage)
    async with storage.subscribe("chain") as events:
        await apply(storage, continued(first))
        await expect(events, JobEventKind.QUEUED)
        await apply(storage, completed(await claim_one(storage)))
        await expect(events, JobEventKind.ACTIVE, JobEventKind.COMPLETED)


@case(guarantees=(6,))
async def a_continuation_broken_off_can_be_repeated(storage: Storage) -> None:
    """A continuation broken off at any moment was done as a whole or not at all, and repeating it completes it."""
    for number in range(16):
        await enqueue(storage, job(f"chain-{number}", payload=b"1"))
        step = continued(await claim_one(storage), payload=b"2", delay=HOUR)
        settling = asyncio.create_task(storage.settle([step]))
        for _ in range(number):
            await asyncio.sleep(0 if number < 8 else 0.0001)
        settling.cancel()
        await asyncio.gather(settling, return_exceptions=True)
        assert await state(storage, step.claim.job_id) in (JobState.PROCESSING, JobState.SCHEDULED)
        assert (await settle(storage, step)).status in (SettleStatus.APPLIED, SettleStatus.ALREADY_APPLIED)
        found = await status(storage, step.claim.job_id)
        assert (found.state, found.chain_index, found.attempt) == (JobState.SCHEDULED, 1, 0)


@case(guarantees=(3, 22), needs=(OUTSIDE_ENDINGS,))
async def a_job_can_be_completed_from_outside(storage: Storage) -> None:
    """A job may be completed from outside at any time: waiters are told its result, and nobody runs it any more."""
    await enqueue(storage, job("failing"))
    retry = retried(await claim_one(storage), HOUR)
    await apply(storage, retry)
    await enqueue(storage, job("queued"), job("scheduled", delay=HOUR), job("prioritised", priority=5))
    for job_id, was in (
        ("failing", JobState.FAILING),
        ("queued", JobState.QUEUED),
        ("scheduled", JobState.SCHEDULED),
        ("prioritised", JobState.QUEUED),
    ):
        async with storage.subscribe(job_id) as events:
            assert await storage.complete(job_id, job_id.encode()) is was
            await expect(events, JobEventKind.COMPLETED)
        assert await storage.result(job_id) == JobOutcome(kind=OutcomeKind.COMPLETED, result=job_id.encode())
    assert await claim(storage, 5) == []
    assert (await storage.counts())[JobState.COMPLETED] == 4
    assert await settle(storage, retry) == COMPLETED


@case(guarantees=(3, 22), needs=(OUTSIDE_ENDINGS,))
async def a_running_job_completed_from_outside_is_lost_to_its_worker(storage: Storage) -> None:
    """The worker of a job completed from outside is told to look and learns of it; its settlement has no effect."""
    await enqueue(storage, job("running"))
    held = await claim_one(storage)
    async with storage.cancel_requests() as requests:
        assert await storage.complete("running", b"outside") is JobState.PROCESSING
        (event,) = await expect(requests, JobEventKind.CANCEL_REQUESTED)
        assert event.job_id == "running"
    assert (await storage.renew([held])).lost == {held.token: LossReason.COMPLETED}
    assert await settle(storage, completed(held, b"inside")) == COMPLETED
    assert await settle(storage, continued(held)) == COMPLETED
    assert await storage.result("running") == JobOutcome(kind=OutcomeKind.COMPLETED, result=b"outside")


@case(guarantees=(22,), needs=(OUTSIDE_ENDINGS,))
async def what_has_ended_is_not_completed_again(storage: Storage) -> None:
    """Completing from outside leaves completed and failed jobs as they are, and creates no unknown ones."""
    await enqueue(storage, job("good"))
    await apply(storage, completed(await claim_one(storage), b"1"))
    await enqueue(storage, job("bad"))
    await apply(storage, failed(await claim_one(storage)))
    assert await storage.complete("good", b"2") is JobState.COMPLETED
    assert await storage.complete("bad", b"2") is JobState.FAILED
    assert await storage.complete("unknown", b"2") is None
    assert await storage.result("good") == JobOutcome(kind=OutcomeKind.COMPLETED, result=b"1")
    assert await state(storage, "bad") is JobState.FAILED
    assert await state(storage, "unknown") is None


@case(guarantees=(3,), needs=(OUTSIDE_ENDINGS,))
async def of_two_endings_one_wins(harness: Harness, storage: Storage) -> None:
    """A job completed by its worker and by others at once has one result, and all but one of them are told so."""
    clients = [await harness.open(storage.queue) for _ in range(3)]
    for number in range(10):
        await enqueue(storage, job(f"job-{number}"))
        held = await claim_one(storage)
        settling = asyncio.create_task(settle(storage, completed(held, b"worker")))
        states = await asyncio.gather(
            *(client.complete(held.job_id, str(at).encode()) for at, client in enumerate(clients))
        )
        outcome = await settling
        winners = [outcome.status is SettleStatus.APPLIED, *(found is JobState.PROCESSING for found in states)]
        assert sum(winners) == 1
        ended = await storage.result(held.job_id)
        assert ended is not None
        assert ended.result == [b"worker", b"0", b"1", b"2"][winners.index(True)]


@case(guarantees=(6, 22), needs=(OUTSIDE_ENDINGS,))
async def a_completion_from_outside_has_a_retention(storage: Storage) -> None:
    """A job completed from outside is kept for its own retention, or the one given; with `DROP` not at all."""
    await enqueue(storage, job("own", keep=DROP), job("given"))
    await storage.complete("own", b"1")
    await storage.complete("given", b"1", keep=DROP)
    assert await storage.status(["own", "given"]) == [None, None]


@case(guarantees=(15, 22), needs=(OUTSIDE_ENDINGS, ORDERING_KEYS))
async def an_ending_from_outside_frees_the_ordering_key(storage: Storage) -> None:
    """An ending from outside frees the ordering key for the next job, whether the first was running or waiting."""
    await enqueue(storage, *(job(str(number), ordering_key="key") for number in range(4)))
    assert ids(await claim(storage, 5)) == ["0"]
    await storage.complete("0", b"1")
    assert ids(await claim(storage, 5)) == ["1"]
    await storage.complete("2", b"1")
    assert await storage.remove(["1"], running=True) == 1
    assert ids(await claim(storage, 5)) == ["3"]


@case(guarantees=(3, 22), needs=(OUTSIDE_ENDINGS,))
async def a_running_job_can_be_removed(harness: Harness, storage: Storage) -> None:
    """A running job is removed only on request: nothing is left, its worker is told to look, and its id is free."""
    await enqueue(storage, job("running"), job("waiting", delay=HOUR))
    held = await claim_one(storage)
    assert await storage.remove(["running"]) == 0
    async with storage.cancel_requests() as requests:
        assert await storage.remove(["running", "waiting", "unknown"], running=True) == 2
        await expect(requests, JobEventKind.CANCEL_REQUESTED)
    assert await storage.status(["running", "waiting"]) == [None, None]
    assert (await storage.renew([held])).lost == {held.token: LossReason.NOT_FOUND}
    assert await settle(storage, completed(held)) == NOT_FOUND
    await harness.advance(timedelta(0))
    assert sum((await storage.counts()).values()) == 0
    await enqueue(storage, job("running"))
    assert (await claim_one(storage)).attempt == 1


@case(guarantees=(15, 22), needs=(OUTSIDE_CONTINUATIONS,))
async def a_chain_goes_on_from_outside(storage: Storage) -> None:
    """An unfinished link is replaced by the next, with fresh attempts and no error, whatever state it was in."""
    assert isinstance(storage, ContinuesFromOutside)
    await enqueue(storage, job("failing"))
    await apply(storage, retried(await claim_one(storage), HOUR))
    await enqueue(storage, job("queued"), job("scheduled", delay=HOUR))
    for job_id in ("failing", "queued", "scheduled"):
        was = await state(storage, job_id)
        async with storage.subscribe(job_id) as events:
            then = job(job_id, name="next", payload=b"2", max_attempts=7, chain_index=1)
            assert await storage.continue_job(then) is was
            await expect(events, JobEventKind.QUEUED)
    claims = await claim(storage, 5)
    assert ids(claims) == ["failing", "queued", "scheduled"]
    for held in claims:
        told = (held.name, held.payload, held.attempt, held.max_attempts, held.chain_index, held.last_error)
        assert told == ("next", b"2", 1, 7, 1, None)
    await apply(storage, *map(completed, claims))
    later = job("later", delay=HOUR, chain_index=1)
    await enqueue(storage, job("later"))
    await storage.continue_job(later)
    assert await state(storage, "later") is JobState.SCHEDULED


@case(guarantees=(3, 22), needs=(OUTSIDE_CONTINUATIONS,))
async def a_running_link_continued_from_outside_is_lost_to_its_worker(storage: Storage) -> None:
    """Its worker is told to look, and nothing that it settles has an effect on the next link."""
    assert isinstance(storage, ContinuesFromOutside)
    await enqueue(storage, job("chain"))
    held = await claim_one(storage)
    async with storage.cancel_requests() as requests:
        assert await storage.continue_job(job("chain", chain_index=1)) is JobState.PROCESSING
        await expect(requests, JobEventKind.CANCEL_REQUESTED)
    assert held.token in (await storage.renew([held])).lost
    assert (await settle(storage, completed(held))).status is SettleStatus.LOST
    found = await status(storage, "chain")
    assert (found.state, found.chain_index, found.attempt) == (JobState.QUEUED, 1, 0)
    again = await claim_one(storage)
    assert (await storage.renew([held, again])).lost.keys() == {held.token}
    await apply(storage, completed(again))


@case(guarantees=(22,), needs=(OUTSIDE_CONTINUATIONS,))
async def only_the_current_link_is_continued(storage: Storage) -> None:
    """What has ended stays as it is, nothing unknown begins, and of two that continue one link one does."""
    assert isinstance(storage, ContinuesFromOutside)
    await enqueue(storage, job("done"))
    await apply(storage, completed(await claim_one(storage), b"1"))
    assert await storage.continue_job(job("done", chain_index=1)) is JobState.COMPLETED
    assert await storage.continue_job(job("unknown", chain_index=1)) is None
    await enqueue(storage, job("chain"))
    again = (storage.continue_job(job("chain", chain_index=1)) for _ in range(3))
    told = await asyncio.gather(*again, return_exceptions=True)
    assert sorted(type(one).__name__ for one in told) == ["JobEndedError", "JobEndedError", "JobState"]
    assert await storage.status(["unknown"]) == [None]
    assert ids(await claim(storage, 5)) == ["chain"]
