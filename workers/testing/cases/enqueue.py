"""The promises of `enqueue`."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from workers.jobs import EnqueueResult, EnqueueStatus, JobState, Renewal
from workers.storage.base import Storage
from workers.testing.case import case
from workers.testing.harness import Harness
from workers.testing.steps import (
    HOUR,
    apply,
    claim,
    claim_one,
    completed,
    dropped,
    enqueue,
    failed,
    ids,
    job,
    next_claim,
    retried,
    state,
    status,
)


@case(guarantees=(1,))
async def acknowledged_jobs_are_seen_by_every_client(harness: Harness) -> None:
    """Another client sees a job whose enqueue was acknowledged, even when the first client has gone."""
    producer = await harness.open()
    worker = await harness.open(producer.queue)
    new = job(payload=b"seen")
    await enqueue(producer, new)
    await harness.shut(producer)
    assert await state(worker, new.id) is JobState.QUEUED
    held = await claim_one(worker)
    assert (held.job_id, held.payload) == (new.id, b"seen")


@case(guarantees=(23,))
async def a_batch_answers_in_order(storage: Storage) -> None:
    """Each job of a batch gets its own answer, in the order of the batch; an empty batch gets none."""
    known = job()
    await enqueue(storage, known)
    first, second = job(), job()
    results = await storage.enqueue([first, known, second])
    assert [result.id for result in results] == [first.id, known.id, second.id]
    assert [result.status for result in results] == [
        EnqueueStatus.QUEUED,
        EnqueueStatus.DUPLICATE,
        EnqueueStatus.QUEUED,
    ]
    assert await storage.enqueue([]) == []


@case(guarantees=(2, 23))
async def the_first_of_a_batch_wins(storage: Storage) -> None:
    """An id that occurs twice in one batch is inserted once, as it occurred first."""
    results = await storage.enqueue([job("twice", payload=b"first"), job("twice", payload=b"second")])
    assert [result.status for result in results] == [EnqueueStatus.QUEUED, EnqueueStatus.DUPLICATE]
    assert [held.payload for held in await claim(storage, 5)] == [b"first"]


@case(guarantees=(2, 23))
async def a_large_batch_is_enqueued_whole(storage: Storage) -> None:
    """A batch of 1 100 jobs is 1 100 jobs for every verb that takes a batch."""
    jobs = [job(f"job-{number:04}") for number in range(1_100)]
    names = [new.id for new in jobs]
    await enqueue(storage, *jobs)
    assert {answer.status for answer in await storage.enqueue(jobs)} == {EnqueueStatus.DUPLICATE}
    held = await claim(storage, len(jobs))
    assert ids(held) == names
    assert await storage.renew(held) == Renewal()
    await apply(storage, *(completed(one) for one in held))
    found = await storage.status(names)
    assert [(one.id, one.state) if one else None for one in found] == [(name, JobState.COMPLETED) for name in names]
    assert await storage.remove(names) == len(names)


@case(guarantees=(2,))
async def an_unfinished_id_is_a_duplicate(storage: Storage) -> None:
    """The id of a scheduled, queued, processing or failing job is not inserted again; its state is reported."""

    async def again(new_id: str) -> tuple[EnqueueStatus, JobState | None]:
        result = (await storage.enqueue([job(new_id)]))[0]
        return result.status, result.existing_state

    await enqueue(storage, job("later", delay=HOUR), job("now"))
    assert await again("later") == (EnqueueStatus.DUPLICATE, JobState.SCHEDULED)
    assert await again("now") == (EnqueueStatus.DUPLICATE, JobState.QUEUED)
    held = await claim_one(storage)
    assert await again("now") == (EnqueueStatus.DUPLICATE, JobState.PROCESSING)
    await apply(storage, retried(held, HOUR))
    assert await again("now") == (EnqueueStatus.DUPLICATE, JobState.FAILING)
    assert await claim(storage) == []


@case(guarantees=(2,))
async def a_completed_id_answers_with_its_result(storage: Storage) -> None:
    """A job whose id has completed is not run again; its stored result comes with the answer."""
    await enqueue(storage, job("done"))
    await apply(storage, completed(await claim_one(storage), b'{"sum":3}'))
    results = await storage.enqueue([job("done")])
    assert results == [
        EnqueueResult(id="done", status=EnqueueStatus.COMPLETED, existing_state=JobState.COMPLETED, result=b'{"sum":3}')
    ]
    assert await claim(storage) == []


@case(guarantees=(2,))
async def a_failed_id_starts_a_new_generation(storage: Storage) -> None:
    """A failed id may be enqueued again: fresh attempts, the new payload, and nothing left of the old record."""
    await enqueue(storage, job("again", payload=b"old", max_attempts=1))
    await apply(storage, failed(await claim_one(storage)))
    await enqueue(storage, job("again", payload=b"new", max_attempts=5))
    fresh = await status(storage, "again")
    assert (fresh.state, fresh.attempt, fresh.last_error, fresh.finished_at) == (JobState.QUEUED, 0, None, None)
    assert await storage.result("again") is None
    held = await claim_one(storage)
    assert (held.payload, held.attempt, held.max_attempts) == (b"new", 1, 5)


@case(guarantees=(2,))
async def a_dropped_id_starts_a_new_generation(storage: Storage) -> None:
    """An id whose record vanished when it completed may be enqueued again."""
    await enqueue(storage, job("gone"))
    await apply(storage, dropped(await claim_one(storage)))
    assert await state(storage, "gone") is None
    await enqueue(storage, job("gone"))
    assert (await claim_one(storage)).attempt == 1


@case(guarantees=(2,))
async def a_hundred_producers_insert_an_id_once(harness: Harness) -> None:
    """Of 100 concurrent producers of one id on four clients, exactly one inserts it."""
    storages = [await harness.open()]
    storages += [await harness.open(storages[0].queue) for _ in range(3)]
    answers = await asyncio.gather(
        *(storages[number % 4].enqueue([job("once", payload=f"{number}".encode())]) for number in range(100))
    )
    statuses = [answer[0].status for answer in answers]
    assert statuses.count(EnqueueStatus.QUEUED) == 1
    assert statuses.count(EnqueueStatus.DUPLICATE) == 99
    winner = f"{statuses.index(EnqueueStatus.QUEUED)}".encode()
    assert [held.payload for held in await claim(storages[0], 10)] == [winner]


@case(guarantees=(2,))
async def a_hundred_producers_start_one_generation(harness: Harness) -> None:
    """Of 100 concurrent producers of a failed id, exactly one starts the new generation."""
    storages = [await harness.open()]
    storages += [await harness.open(storages[0].queue) for _ in range(3)]
    await enqueue(storages[0], job("again"))
    await apply(storages[0], failed(await claim_one(storages[0])))
    answers = await asyncio.gather(*(storages[number % 4].enqueue([job("again")]) for number in range(100)))
    assert [answer[0].status for answer in answers].count(EnqueueStatus.QUEUED) == 1
    assert len(await claim(storages[1], 10)) == 1


@case(guarantees=(16,))
async def a_delayed_job_runs_when_it_is_due(harness: Harness, storage: Storage) -> None:
    """A delayed job is scheduled until its delay is over; then it reads as queued and can be claimed."""
    await enqueue(storage, job("soon", delay=harness.moment), job("later", delay=HOUR))
    assert await state(storage, "later") is JobState.SCHEDULED
    await harness.advance(harness.moment)
    assert await state(storage, "soon") is JobState.QUEUED
    assert (await next_claim(storage)).job_id == "soon"
    assert await claim(storage) == []


@case(guarantees=(16, 24))
async def the_longest_delay_is_kept(harness: Harness, storage: Storage) -> None:
    """The longest delay that the storage takes (100 years unless it declares less) is kept and does not overflow."""
    longest = harness.capabilities.longest_delay
    await enqueue(storage, job("far", delay=longest))
    far = await status(storage, "far")
    assert far.state is JobState.SCHEDULED
    assert far.next_run_at is not None
    assert abs(far.next_run_at - far.created_at - longest) < timedelta(seconds=1)
    assert await claim(storage) == []
