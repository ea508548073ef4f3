"""Jobs that follow jobs of other queues in the same database."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

from workers.errors import UnknownDependency, Unsupported, WorkersError
from workers.jobs import DROP, AfterFailure, JobEventKind, JobRef, JobState, NewJob
from workers.storage.abilities import KnowsDependencies
from workers.storage.base import Storage
from workers.testing.case import DEPENDENCIES, DEPENDENCIES_ACROSS, case
from workers.testing.harness import Harness
from workers.testing.steps import (
    apply,
    background,
    claim,
    claim_one,
    completed,
    enqueue,
    expect,
    failed,
    ids,
    job,
    next_claim,
    state,
)

FINISHERS: Final = 50


def _follower(job_id: str, *after: JobRef, run: bool = False, **options: object) -> NewJob:
    policy = AfterFailure.RUN if run else AfterFailure.FAIL
    new = job(job_id, **options)  # type: ignore[arg-type]  # as in `job`
    return replace(new, after_elsewhere=after, after_failure=policy)


async def _refusal(storage: Storage, *jobs: NewJob) -> WorkersError | None:
    try:
        await enqueue(storage, *jobs)
    except WorkersError as error:
        return error
    return None


async def _error(storage: Storage, job_id: str) -> str:
    outcome = await storage.result(job_id)
    assert outcome is not None
    assert outcome.error is not None
    assert outcome.error.type == "DependencyFailed"
    return outcome.error.message


@case(guarantees=(25,), needs=(DEPENDENCIES,))
async def a_storage_of_one_queue_says_so(harness: Harness) -> None:
    """Where `capabilities.dependencies_across_queues` is not declared, such a job is refused, and nothing is stored."""
    storage, parts = await harness.open(), await harness.open()
    await enqueue(parts, job("part"))
    refused = await _refusal(storage, _follower("whole", JobRef(parts.queue, "part")))
    if harness.capabilities.dependencies_across_queues:
        assert refused is None
        assert await state(storage, "whole") is JobState.WAITING
    else:
        assert isinstance(refused, Unsupported)
        assert parts.queue in str(refused)
        assert await storage.status(["whole"]) == [None]


@case(guarantees=(6, 25), needs=(DEPENDENCIES_ACROSS,))
async def the_last_of_any_queue_releases_and_wakes(harness: Harness) -> None:
    """It is claimable, and a waiter of its own queue is woken, when all have completed, in whatever queue they are."""
    storage, parts, others = [await harness.open() for _ in range(3)]
    await enqueue(storage, job("own"))
    await enqueue(parts, job("part", keep_completed=DROP))
    await enqueue(others, job("other"))
    follows = _follower("whole", JobRef(parts.queue, "part"), JobRef(others.queue, "other"))
    await enqueue(storage, replace(follows, after=("own",)))
    await apply(storage, completed(await claim_one(storage)))
    await apply(others, completed(await claim_one(others)))
    assert [found.waits_for for found in await storage.status(["whole"]) if found] == [1]
    assert isinstance(storage, KnowsDependencies)
    assert isinstance(parts, KnowsDependencies)
    assert await storage.followed("whole") == [JobRef(parts.queue, "part")]
    assert await parts.followers("part") == [JobRef(storage.queue, "whole")]
    assert await claim(storage) == []
    waiter = asyncio.create_task(next_claim(storage))
    async with background(waiter), storage.subscribe("whole") as events:
        await apply(parts, completed(await claim_one(parts)))
        async with asyncio.timeout(30):
            assert (await waiter).job_id == "whole"
        await expect(events, JobEventKind.QUEUED, JobEventKind.ACTIVE)


@case(guarantees=(25,), needs=(DEPENDENCIES_ACROSS,))
async def a_failure_goes_on_from_queue_to_queue(harness: Harness) -> None:
    """What follows a job that failed fails, and says of which queue that was; and so on, also back to the first one."""
    storage, parts = await harness.open(), await harness.open()
    await enqueue(storage, job("first", keep_failed=DROP))
    await enqueue(parts, _follower("second", JobRef(storage.queue, "first"), keep_failed=DROP))
    await enqueue(parts, _follower("besides", JobRef(storage.queue, "first"), run=True))
    await enqueue(storage, _follower("third", JobRef(parts.queue, "second")))
    await apply(storage, failed(await claim_one(storage)))
    assert await parts.status(["second"]) == [None]
    assert await state(storage, "third") is JobState.FAILED
    message = await _error(storage, "third")
    assert f"'second' of queue '{parts.queue}'" in message, message
    assert "DependencyFailed" in message, message
    assert ids(await claim(parts, 5)) == ["besides"]


@case(guarantees=(25,), needs=(DEPENDENCIES_ACROSS,))
async def what_ended_or_is_unknown_elsewhere_counts_as_here(harness: Harness) -> None:
    """A job that completed before is not waited for, one that failed fails it, an unknown one refuses the enqueue."""
    storage, parts = await harness.open(), await harness.open()
    await enqueue(parts, job("good"), job("bad"))
    good, bad = await claim(parts, 2)
    await apply(parts, completed(good), failed(bad))
    await enqueue(storage, job("good"))
    await enqueue(storage, _follower("after-good", JobRef(parts.queue, "good")))
    await enqueue(storage, _follower("after-bad", JobRef(parts.queue, "bad")))
    assert await state(storage, "after-bad") is JobState.FAILED
    for place in (JobRef(parts.queue, "nobody"), JobRef(harness.unique_queue(), "good")):
        refused = await _refusal(storage, job("with it"), _follower("stranger", place))
        assert isinstance(refused, UnknownDependency)
        assert refused.unknown == (place,)
        assert await storage.status(["with it", "stranger"]) == [None, None]
        await enqueue(storage, _follower(f"all the same {place.id}", place, run=True))
    found = sorted(ids(await claim(storage, 9)))
    assert found == ["after-good", "all the same good", "all the same nobody", "good"]


@case(guarantees=(25,), needs=(DEPENDENCIES_ACROSS,))
async def finishers_of_two_queues_strand_nobody(harness: Harness) -> None:
    """When 50 clients of two queues end the dependencies of two jobs at once, each is released exactly once."""
    storages = [await harness.open() for _ in range(2)]
    clients = [[await harness.open(storage.queue) for _ in range(3)] for storage in storages]
    names = [str(number) for number in range(FINISHERS // 2)]
    places = [JobRef(storage.queue, name) for storage in storages for name in names]
    for storage in storages:
        await enqueue(storage, *map(job, names))
    for storage in storages:
        elsewhere = tuple(place for place in places if place.queue != storage.queue)
        await enqueue(storage, replace(_follower("all", *elsewhere), after=tuple(names)))
    claims = [await claim(storage, len(names)) for storage in storages]
    await asyncio.gather(
        *(
            apply(clients[queue][number % 3], completed(held))
            for queue, some in enumerate(claims)
            for number, held in enumerate(some)
        )
    )
    for storage in storages:
        assert ids(await claim(storage, 5)) == ["all"]
