"""The order in which jobs are claimed."""

from __future__ import annotations

from datetime import timedelta

from workers.checks import MAX_PRIORITY
from workers.storage.base import Storage
from workers.testing.case import ORDERING_KEYS, PRIORITY_ORDER, case
from workers.testing.harness import Harness
from workers.testing.steps import (
    HOUR,
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
    released,
    retried,
)


@case(guarantees=(15,))
async def first_come_first_served(storage: Storage) -> None:
    """Jobs of one priority are claimed in the order in which they were enqueued, within a batch and across batches."""
    names = [f"job-{number}" for number in range(30)]
    await enqueue(storage, *(job(name) for name in names[:10]))
    for name in names[10:20]:
        await enqueue(storage, job(name))
    await enqueue(storage, *(job(name) for name in names[20:]))
    claimed = ids(await claim(storage, 7))
    claimed += ids(await claim(storage, 100))
    assert claimed == names


@case(guarantees=(15,), needs=(PRIORITY_ORDER,))
async def lower_priorities_come_first(storage: Storage) -> None:
    """A job of a lower priority goes first, whenever it was enqueued; 2 097 151 is the last."""
    await enqueue(storage, job("last", priority=MAX_PRIORITY), job("middle", priority=10), job("second", priority=1))
    await enqueue(storage, job("first", priority=0), job("middle too", priority=10))
    assert ids(await claim(storage, 10)) == ["first", "second", "middle", "middle too", "last"]


@case(guarantees=(15,))
async def a_released_job_keeps_its_place(storage: Storage) -> None:
    """A released job goes before those that were enqueued after it."""
    await enqueue(storage, job("first"), job("second"))
    await apply(storage, released(await claim_one(storage)))
    assert ids(await claim(storage, 10)) == ["first", "second"]


@case(guarantees=(15, 16))
async def delayed_jobs_come_as_they_are_due(harness: Harness, storage: Storage) -> None:
    """Delayed jobs that are due are claimed in one call, in the order in which they became due."""
    delays = {f"job-{number}": harness.moment - number * timedelta(milliseconds=10) for number in range(5)}
    await enqueue(storage, *(job(name, delay=delay) for name, delay in delays.items()))
    await harness.advance(harness.moment)
    assert ids(await claim(storage, 10)) == sorted(delays, reverse=True)


@case(guarantees=(15,))
async def a_retried_job_queues_again(harness: Harness, storage: Storage) -> None:
    """A retried job is ordered by the time at which it becomes due: behind those that waited meanwhile."""
    await enqueue(storage, job("first"), job("second"))
    held = await claim_one(storage)
    await harness.advance(harness.moment)
    await apply(storage, retried(held))
    assert ids(await claim(storage, 10)) == ["second", "first"]


@case(guarantees=(5, 15))
async def a_recovered_job_keeps_its_place(harness: Harness, storage: Storage) -> None:
    """A job whose worker crashed does not queue behind a backlog."""
    await enqueue(storage, job("first"), *(job() for _ in range(20)))
    await crash(harness, storage)
    await recover(harness, storage, 1)
    assert (await claim_one(storage)).job_id == "first"


@case(guarantees=(15,), needs=(ORDERING_KEYS,))
async def one_ordering_key_runs_one_job(storage: Storage) -> None:
    """Of one ordering key one job runs at a time, in order; other keys, and jobs without a key, are not held up."""
    await enqueue(
        storage,
        *(job("a1", ordering_key="a"), job("a2", ordering_key="a"), job("a3", ordering_key="a")),
        *(job("b1", ordering_key="b"), job("free")),
    )
    held = {one.job_id: one for one in await claim(storage, 10)}
    assert sorted(held) == ["a1", "b1", "free"]
    assert await claim(storage, 10) == []
    await apply(storage, completed(held["a1"]))
    second = await claim(storage, 10)
    assert ids(second) == ["a2"]
    await apply(storage, failed(second[0]))
    assert ids(await claim(storage, 10)) == ["a3"]


@case(guarantees=(15,), needs=(ORDERING_KEYS,))
async def a_waiting_retry_does_not_hold_its_key(storage: Storage) -> None:
    """While a job waits for its retry, the next job of its ordering key runs, even if a claim had skipped it before."""
    await enqueue(storage, job("a1", ordering_key="a"), job("a2", ordering_key="a"))
    (held,) = await claim(storage, 10)
    assert await claim(storage, 10) == []
    await apply(storage, retried(held, HOUR))
    assert (await claim_one(storage)).job_id == "a2"


@case(guarantees=(15,), needs=(ORDERING_KEYS,))
async def every_end_of_an_attempt_frees_its_key(harness: Harness, storage: Storage) -> None:
    """Release and recovery, even one that gives the job up, free an ordering key like any end of an attempt."""
    await enqueue(storage, job("a1", ordering_key="a", max_attempts=2), job("a2", ordering_key="a"))
    await apply(storage, released(await claim_one(storage)))
    await crash(harness, storage)
    await recover(harness, storage, 1)
    held = await claim(storage, 10, lease=harness.moment)
    assert ids(held) == ["a1"]
    await harness.advance(harness.moment)
    assert (await recover(harness, storage, 1)).failed == ("a1",)
    assert ids(await claim(storage, 10)) == ["a2"]


@case(guarantees=(15,), needs=(ORDERING_KEYS,))
async def cancelling_the_next_of_a_key_frees_the_one_after(storage: Storage) -> None:
    """When the next job of an ordering key is cancelled, the job after it is not forgotten."""
    await enqueue(storage, *(job(f"a{number}", ordering_key="a") for number in range(1, 5)))
    held = await claim(storage, 10)
    await storage.cancel("a2")
    await apply(storage, completed(held[0]))
    await storage.cancel("a3")
    assert ids(await claim(storage, 10)) == ["a4"]
