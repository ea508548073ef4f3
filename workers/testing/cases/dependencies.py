"""Jobs that follow others: each runs when the last of them has ended, and is never left behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

from workers.deduplication import Deduplication, DeduplicationMode
from workers.errors import LossReason, UnknownDependency, Unsupported
from workers.jobs import (
    DROP,
    AfterFailure,
    CancelResult,
    EnqueueStatus,
    ErrorInfo,
    JobEventKind,
    JobOutcome,
    JobRef,
    JobState,
    NewJob,
    OutcomeKind,
    SettleStatus,
)
from workers.storage.abilities import KnowsDependencies
from workers.storage.base import Storage
from workers.testing.case import DEDUPLICATION, DEPENDENCIES, MEASURES, ORDERING_KEYS, OUTSIDE_ENDINGS, case
from workers.testing.harness import Harness
from workers.testing.steps import (
    ERROR,
    HOUR,
    apply,
    background,
    claim,
    claim_one,
    completed,
    continued,
    crash,
    dropped,
    enqueue,
    expect,
    failed,
    ids,
    job,
    next_claim,
    recover,
    released,
    retried,
    state,
    status,
    stopped,
)

FINISHERS: Final = 50


@case(guarantees=(21, 25), needs=(DEPENDENCIES,))
async def it_is_known_who_waits_for_whom(storage: Storage) -> None:
    """A storage tells whom a job still waits for, and who waits for it, until they wait no more."""
    assert isinstance(storage, KnowsDependencies)
    await enqueue(storage, job("one"), job("two"), follower("last", "one", "two"), follower("other", "two"))
    here = storage.queue
    assert sorted(await storage.followed("last")) == [JobRef(here, "one"), JobRef(here, "two")]
    assert sorted(await storage.followers("two")) == [JobRef(here, "last"), JobRef(here, "other")]
    assert len(await storage.followers("two", limit=1)) == 1
    await apply(storage, completed(await claim_one(storage)))
    assert (await storage.followed("last"), await storage.followers("one")) == ([JobRef(here, "two")], [])
    await apply(storage, completed(await claim_one(storage)))
    for known in (*await storage.followed("last"), *await storage.followers("two"), *await storage.followed("none")):
        raise AssertionError(f"nobody waits any more, but for {known}")


def follower(job_id: str, *after: str, run: bool = False, **options: object) -> NewJob:
    """Make a job that follows others; with `run` however they end."""
    policy = AfterFailure.RUN if run else AfterFailure.FAIL
    return replace(job(job_id, **options), after=after, after_failure=policy)  # type: ignore[arg-type]  # as in `job`


async def _because_of(storage: Storage, job_id: str, *words: str) -> None:
    """Check that the job failed because of one that it follows, and that its error has these words."""
    assert await state(storage, job_id) is JobState.FAILED
    outcome = await storage.result(job_id)
    assert outcome is not None
    assert outcome.kind is OutcomeKind.FAILED
    assert isinstance(outcome.error, ErrorInfo)
    assert outcome.error.type == "DependencyFailed"
    assert all(word in outcome.error.message for word in words), outcome.error.message


@case(guarantees=(25,), needs=(DEPENDENCIES,))
async def a_job_waits_for_all_it_follows(storage: Storage) -> None:
    """A job that follows two runs when both have completed and no sooner; releases and retries are no ends."""
    await enqueue(storage, job("one"), job("other"), follower("last", "one", "other", "one"))
    assert (await storage.enqueue([follower("last", "one")]))[0].existing_state is JobState.WAITING
    one, other = await claim(storage, 5)
    assert ids([one, other]) == ["one", "other"]
    await apply(storage, released(one), retried(other))
    found = await status(storage, "last")
    assert (found.state, found.waits_for, found.attempt, found.next_run_at) == (JobState.WAITING, 2, 0, None)
    one, other = await claim(storage, 5)
    await apply(storage, completed(other))
    assert (await status(storage, "last")).waits_for == 1
    assert await claim(storage) == []
    await apply(storage, completed(one))
    assert (await status(storage, "last")).waits_for == 0
    last = await claim_one(storage)
    assert (last.job_id, last.attempt) == ("last", 1)
    assert (await storage.settle([completed(one)]))[0].status is SettleStatus.ALREADY_APPLIED
    await apply(storage, completed(last))


@case(guarantees=(25,), needs=(DEPENDENCIES,))
async def a_record_dropped_at_once_has_released(storage: Storage) -> None:
    """Dependencies that leave no record release in the step that ends them, whether they complete or fail."""
    await enqueue(storage, job("done"), job("bad", keep_failed=DROP))
    await enqueue(storage, follower("after-done", "done"), follower("after-bad", "bad"))
    done, bad = await claim(storage, 2)
    await apply(storage, dropped(done), failed(bad))
    assert await storage.status(["done", "bad"]) == [None, None]
    await _because_of(storage, "after-bad", "'bad'", "ValueError", "said no")
    assert (await claim_one(storage)).job_id == "after-done"


@case(guarantees=(25,), needs=(DEPENDENCIES,))
async def what_did_not_complete_fails_its_dependents(harness: Harness, storage: Storage) -> None:
    """A dependency that fails, stalls, is stopped, cancelled or removed fails its dependents, and theirs, at once."""
    names = ("failed", "stopped", "stalled", "cancelled", "removed")
    for name in names:
        await enqueue(storage, job(name, max_attempts=1, priority=names.index(name)))
        await enqueue(storage, follower(f"{name}-2", name), follower(f"{name}-3", f"{name}-2"))
    async with storage.subscribe("failed-3") as events:
        bad, stopping = await claim(storage, 2)
        await apply(storage, failed(bad), stopped(stopping))
        await expect(events, JobEventKind.FAILED)
    await crash(harness, storage)
    await recover(harness, storage, 1)
    assert await storage.cancel("cancelled") is CancelResult.CANCELLED
    assert await storage.remove(["removed"]) == 1
    await _because_of(storage, "failed-2", "'failed'", ERROR.type, ERROR.message)
    await _because_of(storage, "stopped-2", "'stopped'", "cancelled")
    await _because_of(storage, "stalled-2", "'stalled'", "StalledError")
    await _because_of(storage, "cancelled-2", "'cancelled'", "was cancelled")
    await _because_of(storage, "removed-2", "'removed'")
    for name in names:
        await _because_of(storage, f"{name}-3", f"'{name}-2'", "DependencyFailed")
    assert await claim(storage, 5) == []


@case(guarantees=(25,), needs=(DEPENDENCIES,))
async def it_may_run_however_they_end(storage: Storage) -> None:
    """With `run` a job runs when all have ended: completed, failed, cancelled, removed, or unknown from the start."""
    names = ("done", "bad", "cancelled", "removed")
    await enqueue(storage, *(job(name) for name in names), follower("last", *names, "unknown", run=True))
    done, bad = await claim(storage, 2)
    await apply(storage, failed(bad), completed(done))
    await storage.cancel("cancelled")
    assert (await status(storage, "last")).waits_for == 1
    await storage.remove(["removed"])
    assert (await claim_one(storage)).job_id == "last"


@case(guarantees=(25,), needs=(DEPENDENCIES,))
async def what_had_ended_counts_at_the_enqueue(storage: Storage) -> None:
    """Completed ones are not waited for; failed and cancelled ones fail the job at once, or not, as it says."""
    await enqueue(storage, job("done"), job("bad"), job("gone"))
    done, bad = await claim(storage, 2)
    await apply(storage, completed(done), failed(bad))
    await storage.cancel("gone")
    await enqueue(storage, follower("one", "done"), follower("two", "bad", "done"), follower("three", "done", "gone"))
    await enqueue(storage, follower("four", "bad", "gone", "done", run=True))
    await _because_of(storage, "two", "'bad'", ERROR.type)
    await _because_of(storage, "three", "'gone'", "cancelled")
    assert ids(await claim(storage, 5)) == ["one", "four"]


@case(guarantees=(24, 25), needs=(DEPENDENCIES,))
async def unknown_dependencies_are_refused(storage: Storage) -> None:
    """A job cannot follow an unknown or later one, nor itself: nothing of the call is stored. Repeats may be late."""
    for jobs in (
        [job("fine"), follower("one", "unknown")],
        [follower("one", "two"), follower("two", "one")],
    ):
        told = await asyncio.gather(storage.enqueue(jobs), return_exceptions=True)
        assert isinstance(told[0], UnknownDependency), told
        assert told[0].job_id == "one"
    assert await storage.status(["fine", "one", "two"]) == [None] * 3
    for impossible in ({"after": ("one",)}, {"after": tuple(map(str, range(1_001)))}, {"after": ("",)}):
        try:
            replace(job("one"), **impossible)
        except ValueError:
            continue
        raise AssertionError(f"{impossible} was taken")
    await enqueue(storage, job("first"), follower("second", "first"))
    await storage.remove(["first"])
    again = await storage.enqueue([follower("third", "second", run=True), follower("third", "first")])
    assert [one.status for one in again] == [EnqueueStatus.QUEUED, EnqueueStatus.DUPLICATE]


@case(guarantees=(25,), needs=(DEPENDENCIES,))
async def a_call_may_build_a_whole_graph(storage: Storage) -> None:
    """Jobs follow earlier ones of their call, up to 1 000 of them; priorities hold among those that are released."""
    leaves = [job(f"leaf-{number}") for number in range(1_000)]
    await enqueue(
        storage,
        *leaves,
        follower("all", *(leaf.id for leaf in leaves)),
        follower("late", "leaf-0", "leaf-999", priority=2),
        follower("soon", "leaf-0", "leaf-999", priority=1),
    )
    claims = await claim(storage, 1_000)
    await apply(storage, *map(completed, claims[:-1]))
    assert [found and found.waits_for for found in await storage.status(["all", "late"])] == [1, 1]
    await apply(storage, completed(claims[-1]))
    assert ids(await claim(storage, 5)) == ["all", "soon", "late"]


@case(guarantees=(25,), needs=(DEPENDENCIES,))
async def a_long_line_of_dependents_ends_in_one_step(storage: Storage) -> None:
    """The failure of the first fails 500 that follow one another, and what follows the last runs if it may."""
    line = [job("0"), *(follower(str(number), str(number - 1)) for number in range(1, 501))]
    await enqueue(storage, *line, follower("end", "500", run=True))
    await storage.cancel("0")
    counts = await storage.counts()
    assert (counts[JobState.FAILED], counts[JobState.WAITING], counts[JobState.QUEUED]) == (500, 0, 1)
    await _because_of(storage, "500", "'499'", "DependencyFailed")


@case(guarantees=(16, 25), needs=(DEPENDENCIES,))
async def its_delay_counts_from_its_release(harness: Harness, storage: Storage) -> None:
    """A delayed job is scheduled when it is released, for its delay from then; its place is behind those that wait."""
    await enqueue(storage, job("first"), follower("later", "first", delay=harness.moment), follower("next", "first"))
    await enqueue(storage, job("second"))
    await harness.advance(2 * harness.moment)
    assert await state(storage, "later") is JobState.WAITING
    first = await claim_one(storage)
    await apply(storage, completed(first))
    assert ids(await claim(storage, 5)) == ["second", "next"]
    if harness.moves_time:
        assert await state(storage, "later") is JobState.SCHEDULED
        await harness.advance(harness.moment)
    assert (await next_claim(storage)).job_id == "later"


@case(guarantees=(7, 22, 25), needs=(DEPENDENCIES,))
async def a_waiting_job_is_managed_like_others(storage: Storage) -> None:
    """It is cancelled, removed, or promoted, after which it follows nobody; what comes late does not touch it."""
    names = ("cancelled", "removed", "promoted")
    await enqueue(storage, job("first"), *(follower(name, "first", delay=HOUR) for name in names))
    await enqueue(storage, *(follower(f"after-{name}", name) for name in names))
    assert await storage.cancel("cancelled") is CancelResult.CANCELLED
    assert await storage.result("cancelled") == JobOutcome(kind=OutcomeKind.CANCELLED)
    assert await storage.remove(["removed"]) == 1
    first = await claim_one(storage)
    assert await storage.promote(["promoted", "removed"]) == 1
    promoted = await claim_one(storage)
    await apply(storage, completed(promoted))
    assert (await claim_one(storage)).job_id == "after-promoted"
    await _because_of(storage, "after-cancelled", "'cancelled'")
    await _because_of(storage, "after-removed", "'removed'")
    await apply(storage, completed(first))
    assert await claim(storage, 5) == []
    assert [await state(storage, name) for name in names] == [JobState.CANCELLED, None, JobState.COMPLETED]


@case(guarantees=(25,), needs=(DEPENDENCIES,))
async def two_jobs_never_wait_for_each_other(storage: Storage) -> None:
    """Of one call a job follows earlier ones; a later one is unknown to it."""
    await enqueue(storage, follower("a", "b", run=True), follower("b", "a", run=True))
    first = await claim_one(storage)
    assert first.job_id == "a"
    await apply(storage, completed(first))
    assert (await claim_one(storage)).job_id == "b"


@case(guarantees=(22, 25), needs=(DEPENDENCIES, DEDUPLICATION))
async def a_debounced_job_is_promoted_at_once(storage: Storage) -> None:
    """Although it would wait on when those that it follows have ended."""
    debounce = Deduplication(key="key", mode=DeduplicationMode.DEBOUNCE, ttl=HOUR)
    await enqueue(storage, job("first"), follower("last", "first", deduplication=debounce))
    assert await storage.promote(["last"]) == 1
    assert await state(storage, "last") is JobState.QUEUED
    assert ids(await claim(storage, 2)) == ["first", "last"]


@case(guarantees=(21, 22, 25), needs=(DEPENDENCIES,))
async def waiting_jobs_are_counted_listed_and_drained(storage: Storage) -> None:
    """Waiting jobs are a state of their own for readers, in pages; a drain removes them and releases none."""
    await enqueue(storage, job("running"))
    await claim_one(storage)
    await enqueue(storage, job("first"), *(follower(str(number), "first", run=True) for number in range(5)))
    await enqueue(storage, follower("kept", "running", run=True))
    assert (await storage.counts())[JobState.WAITING] == 6
    page = await storage.list(JobState.WAITING, limit=4)
    rest = await storage.list(JobState.WAITING, cursor=page.cursor)
    assert sorted(found.id for found in (*page.jobs, *rest.jobs)) == [*"01234", "kept"]
    assert {found.waits_for for found in (*page.jobs, *rest.jobs)} == {1}
    assert await storage.drain() == 7
    assert sum((await storage.counts()).values()) == 1
    assert await claim(storage) == []


@case(guarantees=(7, 22, 25), needs=(DEPENDENCIES,))
async def jobs_that_follow_one_another_are_removed_together(storage: Storage) -> None:
    """In whatever order they are named, and by a drain; also if what fails with another is not kept."""
    for keep in (HOUR, DROP):
        for named in (["a", "b", "c"], ["c", "b", "a"], None):
            await enqueue(storage, job("a"))
            await enqueue(storage, follower("b", "a", keep_failed=keep), follower("c", "b", keep_failed=keep))
            assert await (storage.remove(named) if named else storage.drain()) == 3
            assert sum((await storage.counts()).values()) == 0


@case(guarantees=(25,), needs=(DEPENDENCIES, OUTSIDE_ENDINGS))
async def endings_from_outside_release(storage: Storage) -> None:
    """A job completed from outside releases, also one that was waiting; a running one that is removed is gone."""
    await enqueue(storage, job("one"), follower("two", "one"), follower("three", "two"), follower("four", "one"))
    assert await storage.complete("two", b"2") is JobState.WAITING
    assert (await claim(storage, 5))[1].job_id == "three"
    assert await storage.remove(["one"], running=True) == 1
    await _because_of(storage, "four", "'one'")
    assert await storage.result("two") == JobOutcome(kind=OutcomeKind.COMPLETED, result=b"2")
    await enqueue(storage, job("five"), follower("six", "five"))
    assert await storage.complete("five", b"5", keep=DROP) is JobState.QUEUED
    assert (await claim_one(storage)).job_id == "six"


@case(guarantees=(25,), needs=(DEPENDENCIES,))
async def a_chain_is_followed_to_its_end(storage: Storage) -> None:
    """A job that follows a chain runs after its last link; a job that was released may itself go on as a chain."""
    await enqueue(storage, job("chain"), follower("next", "chain"), follower("last", "next"))
    await apply(storage, continued(await claim_one(storage)))
    assert await state(storage, "next") is JobState.WAITING
    await apply(storage, completed(await claim_one(storage)))
    await apply(storage, continued(await claim_one(storage)))
    assert await state(storage, "last") is JobState.WAITING
    await apply(storage, completed(await claim_one(storage)))
    assert (await claim_one(storage)).job_id == "last"


@case(guarantees=(25,), needs=(DEPENDENCIES,))
async def a_retried_dependency_takes_nothing_back(storage: Storage) -> None:
    """Those that failed because of it stay so; retried themselves, they run at once; a new generation may follow it."""
    await enqueue(storage, job("first"), follower("second", "first"), follower("third", "first"))
    await apply(storage, failed(await claim_one(storage)))
    assert await storage.retry(["first", "second"]) == 2
    await _because_of(storage, "third", "'first'")
    first, second = await claim(storage, 5)
    assert ids([first, second]) == ["first", "second"]
    await enqueue(storage, follower("third", "first"))
    assert await state(storage, "third") is JobState.WAITING
    await apply(storage, completed(second), completed(first))
    assert (await claim_one(storage)).job_id == "third"


@case(guarantees=(15, 25), needs=(DEPENDENCIES, ORDERING_KEYS))
async def a_waiting_job_holds_no_ordering_key(storage: Storage) -> None:
    """Others of its key run while it waits; once released it takes its turn."""
    await enqueue(storage, job("first"), follower("second", "first", ordering_key="key"))
    await enqueue(storage, job("other", ordering_key="key"))
    first, other = await claim(storage, 5)
    assert ids([first, other]) == ["first", "other"]
    await apply(storage, completed(first))
    assert await claim(storage) == []
    await apply(storage, completed(other))
    assert (await claim_one(storage)).job_id == "second"


@case(guarantees=(2, 25), needs=(DEPENDENCIES, DEDUPLICATION))
async def a_waiting_job_holds_its_deduplication_key(harness: Harness, storage: Storage) -> None:
    """A second job of the key is a duplicate while it waits; a debounce replaces its payload and it goes on waiting."""
    simple = Deduplication(key="simple")
    debounce = Deduplication(key="debounce", mode="debounce", ttl=harness.moment)  # type: ignore[arg-type]  # a word
    await enqueue(storage, job("first"), follower("one", "first", deduplication=simple))
    await enqueue(storage, follower("two", "first", deduplication=debounce, payload=b"old"))
    again = [job("new", deduplication=simple), job("newer", deduplication=debounce, payload=b"new")]
    answers = await storage.enqueue(again)
    assert [(one.id, one.existing_state) for one in answers] == [("one", JobState.WAITING), ("two", JobState.WAITING)]
    await apply(storage, completed(await claim_one(storage)))
    assert (await claim_one(storage)).job_id == "one"
    if harness.moves_time:
        assert await state(storage, "two") is JobState.SCHEDULED
        await harness.advance(harness.moment)
    two = await next_claim(storage)
    assert (two.job_id, two.payload) == ("two", b"new")


@case(guarantees=(19, 20, 25), needs=(DEPENDENCIES,))
async def a_release_wakes_waiting_workers(storage: Storage, other: Storage) -> None:
    """A worker asleep gets a job that another client's settlement releases, and subscribers hear of its release."""
    await enqueue(storage, job("first"), follower("second", "first"))
    first = await claim_one(storage)
    waiter = asyncio.create_task(next_claim(other))
    async with background(waiter), storage.subscribe("second") as events:
        await apply(storage, completed(first))
        async with asyncio.timeout(30):
            assert (await waiter).job_id == "second"
        await expect(events, JobEventKind.QUEUED, JobEventKind.ACTIVE)


@case(guarantees=(25,), needs=(DEPENDENCIES,))
async def concurrent_finishers_strand_nobody(harness: Harness, storage: Storage) -> None:
    """When 50 clients end the dependencies of a job at the same moment, it is released exactly once."""
    clients = [await harness.open(storage.queue) for _ in range(5)]
    names = [str(number) for number in range(FINISHERS)]
    await enqueue(storage, *map(job, names), follower("all", *names), follower("any", *names, run=True))
    claims = await claim(storage, FINISHERS)
    await asyncio.gather(
        *(apply(clients[number % 5], completed(held)) for number, held in enumerate(claims)),
    )
    assert sorted(ids(await claim(storage, 5))) == ["all", "any"]


@case(guarantees=(25,), needs=(DEPENDENCIES,))
async def an_enqueue_beside_the_end_is_not_left_behind(storage: Storage, other: Storage) -> None:
    """Jobs that begin to follow another while it ends are released all the same."""
    for number in range(10):
        await enqueue(storage, job(f"first-{number}"))
        held = await claim_one(storage)
        follows = [follower(f"{number}-{place}", held.job_id) for place in range(5)]
        await asyncio.gather(apply(storage, completed(held)), *(enqueue(other, one) for one in follows))
        claims = await claim(storage, 10)
        assert len(claims) == len(follows)
        await apply(storage, *map(completed, claims))


@case(guarantees=(12, 25), needs=(DEPENDENCIES, MEASURES))
async def what_was_waited_for_leaves_nothing(harness: Harness, storage: Storage) -> None:
    """However they end, nothing is left of who followed whom."""
    await enqueue(storage, job("x", keep=DROP))
    await apply(storage, completed(await claim_one(storage)))
    before = await harness.entries(storage)
    for round_ in range(3):
        names = [f"{round_}-{place}" for place in range(4)]
        await enqueue(storage, job(names[0], keep=DROP))
        await enqueue(storage, *(follower(name, names[0], keep=DROP) for name in names[1:]))
        await enqueue(storage, follower(f"{round_}-last", *names[1:], keep=DROP))
        await storage.cancel(names[1])
        await storage.remove([names[2]])
        await apply(storage, failed(await claim_one(storage)) if round_ else completed(await claim_one(storage)))
        await apply(storage, *map(completed, await claim(storage, 5)))
    assert await harness.entries(storage) == before


@case(guarantees=(25,), needs=(DEPENDENCIES,))
async def a_late_settle_releases_nobody(harness: Harness, storage: Storage) -> None:
    """A claim that was lost ends nothing that others wait for."""
    await enqueue(storage, job("first"), follower("second", "first"))
    (late,) = await crash(harness, storage)
    await recover(harness, storage, 1)
    held = await claim_one(storage)
    assert (await storage.settle([completed(late)]))[0].reason is LossReason.TAKEN
    assert await state(storage, "second") is JobState.WAITING
    await apply(storage, completed(held))
    assert (await claim_one(storage)).job_id == "second"


@case(guarantees=(24,))
async def a_storage_without_dependencies_says_so(harness: Harness, storage: Storage) -> None:
    """Without `capabilities.dependencies` such a job is refused with `Unsupported`, and nothing is stored."""
    await enqueue(storage, job("first"))
    try:
        await storage.enqueue([job("alone"), follower("second", "first")])
    except Unsupported:
        assert not harness.capabilities.dependencies
        assert await storage.status(["alone", "second"]) == [None, None]
    else:
        assert harness.capabilities.dependencies
