"""Jobs that come after others read how these ended: what they gave, and why some did not complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

from workers.jobs import DROP, Completed, Continued, JobOutcome, JobRef, JobState, OutcomeKind
from workers.storage.abilities import KnowsDependencies
from workers.storage.base import Storage
from workers.storage.rules import COPIED_BYTES
from workers.testing.case import (
    DEPENDENCIES,
    DEPENDENCIES_ACROSS,
    MEASURES,
    OUTSIDE_CONTINUATIONS,
    OUTSIDE_ENDINGS,
    case,
)
from workers.testing.cases.dependencies import follower
from workers.testing.harness import Harness
from workers.testing.steps import (
    ERROR,
    HOUR,
    apply,
    claim,
    claim_one,
    completed,
    continued,
    enqueue,
    failed,
    job,
    retried,
)


async def _outcomes(storage: Storage, job_id: str) -> Mapping[JobRef, JobOutcome | None]:
    assert isinstance(storage, KnowsDependencies)
    return await storage.outcomes(job_id)


async def _here(storage: Storage, job_id: str) -> dict[str, JobOutcome | None]:
    """Return how those ended that the job came after, all of which are of its own queue."""
    found = await _outcomes(storage, job_id)
    assert all(one.queue == storage.queue for one in found)
    return {one.id: outcome for one, outcome in found.items()}


def _gave(result: bytes | None) -> JobOutcome:
    return JobOutcome(kind=OutcomeKind.COMPLETED, result=result)


@case(guarantees=(25,), needs=(DEPENDENCIES,))
async def a_job_reads_what_those_before_it_gave(harness: Harness, storage: Storage) -> None:
    """Of each that it came after it has the id and the result, also of one that had completed before the enqueue."""
    await enqueue(storage, job("early"), job("one"), job("two"))
    early, one, two = await claim(storage, 3)
    await apply(storage, completed(early, b"0"))
    await enqueue(storage, follower("last", "early", "one", "two"), follower("other", "early"), job("alone"))
    assert await _here(storage, "last") == {"early": _gave(b"0")}
    await apply(storage, completed(one, b"\x001\xff"), completed(two, b""))
    assert await _here(storage, "last") == {"early": _gave(b"0"), "one": _gave(b"\x001\xff"), "two": _gave(b"")}
    other = await harness.open(storage.queue)
    assert await _here(other, "last") == await _here(storage, "last")
    assert await _here(storage, "other") == {"early": _gave(b"0")}
    assert [await _here(storage, job_id) for job_id in ("alone", "one", "unknown")] == [{}, {}, {}]


@case(guarantees=(25,), needs=(DEPENDENCIES,))
async def results_last_until_the_job_has_ended(storage: Storage) -> None:
    """They are there though the records of the jobs are gone, or never were, and each attempt reads them again."""
    await enqueue(storage, job("one"), job("two", keep_completed=DROP))
    one, two = await claim(storage, 2)
    await enqueue(storage, follower("last", "one", "two", keep_failed=HOUR))
    await apply(storage, completed(one, b"1"), completed(two, b"2"))
    assert await storage.remove(["one"]) == 1
    assert await storage.status(["one", "two"]) == [None, None]
    expected = {"one": _gave(b"1"), "two": _gave(b"2")}
    await apply(storage, retried(await claim_one(storage)))
    held = await claim_one(storage)
    assert (held.attempt, await _here(storage, "last")) == (2, expected)
    await apply(storage, failed(held))
    assert await storage.retry(["last"]) == 1
    held = await claim_one(storage)
    assert (held.attempt, await _here(storage, "last")) == (1, expected)


@case(guarantees=(25,), needs=(DEPENDENCIES,))
async def an_ended_job_leaves_its_results_to_nobody(storage: Storage) -> None:
    """Another job of its id, and one whose record was removed, has nothing of what the former one read."""
    await enqueue(storage, job("one"), follower("again", "one"), follower("gone", "one"))
    await apply(storage, completed(await claim_one(storage), b"1"))
    await apply(storage, *map(failed, await claim(storage, 2)))
    assert await storage.remove(["gone"]) == 1
    await enqueue(storage, job("again"), job("gone"))
    assert (await _here(storage, "again"), await _here(storage, "gone")) == ({}, {})


@case(guarantees=(12, 25), needs=(DEPENDENCIES, MEASURES))
async def results_for_others_leave_nothing(harness: Harness, storage: Storage) -> None:
    """When a job has ended, and its record is gone, no more is left than of a job that came after nobody."""
    await enqueue(storage, job("x", keep=DROP))
    await apply(storage, completed(await claim_one(storage)))
    counted = [await harness.entries(storage)]
    for after in ((), ("one",)):
        for way in ("dropped", "cleaned", "removed", "expired", "drained"):
            keep = DROP if way == "dropped" else timedelta(milliseconds=1) if way == "expired" else HOUR
            await enqueue(storage, job("one", keep=DROP))
            await enqueue(storage, follower(way, *after, keep=keep))
            await apply(storage, completed(await claim_one(storage), b"1"))
            if way == "drained":
                assert await storage.drain() == 1
                continue
            await apply(storage, failed(await claim_one(storage)))
            if way == "cleaned":
                assert await storage.clean(JobState.FAILED, older_than=timedelta(0)) == 1
            if way == "removed":
                assert await storage.remove([way]) == 1
            if way == "expired":
                await harness.advance(timedelta(milliseconds=1))
                await storage.sweep(1_000)
        counted.append(await harness.entries(storage))
    before, first, second = counted
    assert second - first <= first - before


@case(guarantees=(25,), needs=(DEPENDENCIES,))
async def a_job_reads_why_those_before_it_did_not_complete(storage: Storage) -> None:
    """One that runs however they end has the error of each that failed, and knows which were cancelled, or are gone."""
    await enqueue(storage, job("early"), job("bad"), job("lost", keep_failed=DROP))
    early, bad, lost = await claim(storage, 3)
    await apply(storage, failed(early))
    await enqueue(storage, job("off"), job("removed"), follower("because", "bad"))
    everyone = ("early", "bad", "lost", "off", "removed", "because", "unknown")
    await enqueue(storage, follower("last", *everyone, run=True))
    await apply(storage, failed(bad), failed(lost))
    await storage.cancel("off")
    await storage.remove(["removed"])
    assert (await claim_one(storage)).job_id == "last"
    found = await _here(storage, "last")
    assert sorted(found) == sorted(everyone)
    for job_id in ("early", "bad", "lost"):
        assert found[job_id] == JobOutcome(kind=OutcomeKind.FAILED, error=ERROR), job_id
    assert found["off"] == JobOutcome(kind=OutcomeKind.CANCELLED)
    assert (found["removed"], found["unknown"]) == (None, None)
    because = found["because"]
    assert because is not None
    assert because.error is not None
    assert because.error.type == "DependencyFailed"
    assert "'bad'" in because.error.message


@case(guarantees=(25,), needs=(DEPENDENCIES,))
async def a_retry_in_between_is_not_told(storage: Storage) -> None:
    """A job that completed after a failure has its result alone, and no error."""
    await enqueue(storage, job("one"), follower("last", "one"))
    await apply(storage, retried(await claim_one(storage)))
    await apply(storage, completed(await claim_one(storage), b"1"))
    await enqueue(storage, follower("late", "one"))
    for job_id in ("last", "late"):
        assert await _here(storage, job_id) == {"one": _gave(b"1")}


@case(guarantees=(25,), needs=(DEPENDENCIES,))
async def a_result_too_large_to_copy_is_told_of(storage: Storage) -> None:
    """Of a result above the bound there is the end alone; one at the bound is there."""
    await enqueue(storage, job("large"), job("larger", keep_completed=DROP), job("early"))
    large, larger, early = await claim(storage, 3)
    await apply(storage, completed(early, bytes(COPIED_BYTES + 1)))
    await enqueue(storage, follower("last", "large", "larger", "early"))
    await apply(storage, completed(large, bytes(COPIED_BYTES)), completed(larger, bytes(COPIED_BYTES + 1)))
    expected = {"large": _gave(bytes(COPIED_BYTES)), "larger": _gave(None), "early": _gave(None)}
    assert await _here(storage, "last") == expected


@case(guarantees=(25,), needs=(DEPENDENCIES,))
async def a_job_reads_from_as_many_as_it_may_follow(storage: Storage) -> None:
    """A job that comes after 1 000 has the result of each."""
    names = [f"part-{number}" for number in range(1_000)]
    await enqueue(storage, *map(job, names), follower("last", *names))
    claims = [held for _ in range(4) for held in await claim(storage, 250)]
    await apply(storage, *(completed(held, held.job_id.encode()) for held in claims))
    assert await _here(storage, "last") == {name: _gave(name.encode()) for name in names}


@case(guarantees=(25,), needs=(DEPENDENCIES, OUTSIDE_ENDINGS))
async def a_job_reads_what_was_given_from_outside(storage: Storage) -> None:
    """The result of a job that was completed without its worker counts as any; so does that of one already running."""
    await enqueue(storage, job("runs", keep_completed=DROP))
    await claim_one(storage)
    await enqueue(storage, job("waits"), follower("last", "runs", "waits"))
    await storage.complete("runs", b"1")
    await storage.complete("waits", b"2")
    assert await _here(storage, "last") == {"runs": _gave(b"1"), "waits": _gave(b"2")}


@case(guarantees=(6, 25), needs=(DEPENDENCIES,))
async def a_later_link_reads_what_those_before_it_gave(storage: Storage) -> None:
    """What a completion enqueues has the results of those before it, so has its chain, until a link is after others."""
    await enqueue(storage, job("one"), job("two"), job("three"))
    one, two, three = await claim(storage, 3)
    await apply(storage, completed(one, b"1"))
    await apply(storage, Completed(claim=two, result=b"2", then=follower("chain", "one", "three")))
    await apply(storage, completed(three, b"3"))
    first = {"one": _gave(b"1"), "three": _gave(b"3")}
    held = await claim_one(storage)
    assert await _here(storage, "chain") == first
    await apply(storage, continued(held))
    held = await claim_one(storage)
    assert await _here(storage, "chain") == first
    await apply(storage, Continued(claim=held, then=follower("chain", "two", chain_index=2)))
    held = await claim_one(storage)
    assert await _here(storage, "chain") == {"two": _gave(b"2")}
    await enqueue(storage, job("four"))
    four = await claim_one(storage)
    await apply(storage, Continued(claim=held, then=follower("chain", "four", "two", chain_index=3)))
    await apply(storage, completed(four, b"4"))
    await claim_one(storage)
    assert await _here(storage, "chain") == {"two": _gave(b"2"), "four": _gave(b"4")}


@case(guarantees=(25,), needs=(DEPENDENCIES, OUTSIDE_CONTINUATIONS))
async def what_a_chain_gave_is_that_of_its_last_link(storage: Storage) -> None:
    """A job after a chain reads the result of the last link; the chain reads the same as before a step from outside."""
    await enqueue(storage, job("one"))
    await apply(storage, completed(await claim_one(storage), b"1"))
    await enqueue(storage, follower("chain", "one"), follower("last", "chain"))
    then = replace(job("chain"), chain_index=1)
    assert await storage.continue_job(then) is JobState.QUEUED  # type: ignore[attr-defined]  # as the need says
    held = await claim_one(storage)
    assert await _here(storage, "chain") == {"one": _gave(b"1")}
    await apply(storage, completed(held, b"2"))
    assert await _here(storage, "last") == {"chain": _gave(b"2")}


@case(guarantees=(25,), needs=(DEPENDENCIES_ACROSS,))
async def a_job_reads_what_those_of_other_queues_gave(harness: Harness) -> None:
    """It has them by queue and id, two of one id among them, and the errors of those that failed, or are unknown."""
    storage, parts = await harness.open(), await harness.open()
    await enqueue(storage, job("part"))
    await enqueue(parts, job("part", keep_completed=DROP), job("early"), job("bad"))
    own = await claim_one(storage)
    part, early, bad = await claim(parts, 3)
    await apply(parts, completed(early, b"0"))
    nobody = JobRef(harness.unique_queue(), "nobody")
    elsewhere = (*(JobRef(parts.queue, one) for one in ("part", "early", "bad")), nobody)
    await enqueue(storage, replace(follower("whole", "part", run=True), after_elsewhere=elsewhere))
    await apply(storage, completed(own, b"1"))
    await apply(parts, completed(part, b"2"), failed(bad))
    assert (await claim_one(storage)).job_id == "whole"
    assert await _outcomes(storage, "whole") == {
        JobRef(storage.queue, "part"): _gave(b"1"),
        JobRef(parts.queue, "part"): _gave(b"2"),
        JobRef(parts.queue, "early"): _gave(b"0"),
        JobRef(parts.queue, "bad"): JobOutcome(kind=OutcomeKind.FAILED, error=ERROR),
        nobody: None,
    }
