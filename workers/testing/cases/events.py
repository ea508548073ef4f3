"""The promises of `events` and `subscribe`."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from workers.jobs import DROP, TERMINAL_EVENTS, JobEvent, JobEventKind, JobOutcome, OutcomeKind
from workers.storage.base import Storage, Subscription
from workers.testing.case import RESULTS_TOLD, case
from workers.testing.harness import Harness
from workers.testing.steps import (
    HOUR,
    PATIENCE,
    apply,
    claim,
    claim_one,
    completed,
    continued,
    crash,
    enqueue,
    expect,
    failed,
    job,
    recover,
    released,
    retried,
    state,
)

KIND = JobEventKind


@case(guarantees=(20,))
async def a_jobs_life_is_told_in_order(harness: Harness, storage: Storage) -> None:
    """A subscriber on another client hears every change of its job in order, and of no other job."""
    listener = await harness.open(storage.queue)
    async with listener.subscribe("job") as subscription:
        await enqueue(storage, job("noise", delay=HOUR), job("job"))
        await apply(storage, released(await claim_one(storage)))
        await apply(storage, retried(await claim_one(storage)))
        await expect(subscription, KIND.QUEUED, KIND.ACTIVE, KIND.QUEUED, KIND.ACTIVE, KIND.FAILING)
        await apply(storage, completed(await claim_one(storage)))
        events = await expect(subscription, KIND.ACTIVE, KIND.COMPLETED)
    assert {event.job_id for event in events} == {"job"}


@case(guarantees=(14, 20))
async def every_jobs_changes_are_told(harness: Harness, storage: Storage) -> None:
    """`events` reports all jobs of the queue, and none of another queue."""
    elsewhere = await harness.open()
    async with storage.events() as subscription:
        await enqueue(elsewhere, job("elsewhere"))
        await enqueue(storage, job("one"))
        await enqueue(storage, job("two"))
        await apply(storage, failed(await claim_one(storage)))
        events = await expect(subscription, KIND.QUEUED, KIND.QUEUED, KIND.ACTIVE, KIND.FAILED)
    assert [event.job_id for event in events] == ["one", "two", "one", "one"]


@case(guarantees=(20,))
async def a_subscription_is_confirmed_before_it_starts(harness: Harness, storage: Storage) -> None:
    """What happens right after the context is entered is heard, every one of 20 times."""
    listener = await harness.open(storage.queue)
    for number in range(20):
        async with listener.subscribe(f"job-{number}") as subscription:
            await enqueue(storage, job(f"job-{number}"))
            await expect(subscription, KIND.QUEUED)


@case(guarantees=(20,))
async def waiters_of_one_job_are_independent(storage: Storage) -> None:
    """Several waiters of one id each hear its end; one that leaves takes nothing from the others."""
    await enqueue(storage, job("job"))
    held = await claim_one(storage)
    async with storage.subscribe("job") as first, storage.subscribe("job") as second:
        async with storage.subscribe("job"):
            pass
        await apply(storage, completed(held))
        await expect(first, KIND.COMPLETED)
        await expect(second, KIND.COMPLETED)


@case(guarantees=(20,))
async def an_impatient_waiter_loses_nothing(storage: Storage) -> None:
    """An event that comes after a cancelled `get` is returned by the next one."""
    async with storage.subscribe("job") as subscription:
        impatient = asyncio.create_task(subscription.get())
        await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.gather(impatient, return_exceptions=True)
        await enqueue(storage, job("job"))
        async with asyncio.timeout(PATIENCE):
            assert await subscription.get() == JobEvent(kind=KIND.QUEUED, job_id="job")


@case(guarantees=(5, 20))
async def a_recovered_job_is_told(harness: Harness, storage: Storage) -> None:
    """Subscribers hear that a job which the reaper brings back is queued again."""
    await enqueue(storage, job("job"))
    await crash(harness, storage)
    async with storage.subscribe("job") as subscription:
        await recover(harness, storage, 1)
        await expect(subscription, KIND.QUEUED)


@case(guarantees=(7, 20))
async def a_cancel_request_is_told(storage: Storage, other: Storage) -> None:
    """A worker that listens hears of a cancel request before its next renewal."""
    await enqueue(storage, job("job"))
    await claim_one(storage)
    async with storage.events() as subscription:
        await other.cancel("job")
        await expect(subscription, KIND.CANCEL_REQUESTED)


@case(guarantees=(20,))
async def the_result_is_there_when_the_end_is_told(storage: Storage, other: Storage) -> None:
    """A subscriber who hears that a job completed can read its result at once."""
    await enqueue(storage, *(job(f"job-{number}") for number in range(10)))
    for number in range(10):
        async with other.subscribe(f"job-{number}") as subscription:
            held = await claim_one(storage)
            await asyncio.gather(apply(storage, completed(held, b"1")), _read_at_the_end(other, subscription, number))


@case(guarantees=(6, 20), needs=(RESULTS_TOLD,))
async def a_small_result_travels_with_the_end(harness: Harness, storage: Storage, other: Storage) -> None:
    """A result of up to 4 KiB that is soon gone, or not kept at all, is in the event.

    So is that of a chain's last link, and of a completion from outside.
    """
    results = {"soon": b"", "now": b"x" * 4_096, "chain": b"\x00 \n:%\xff", "outside": b'"1"'}
    for name, result in results.items():
        if name == "outside" and not harness.capabilities.outside_endings:
            continue
        await enqueue(storage, job(name, keep=harness.moment if name == "soon" else DROP))
        async with other.subscribe(name) as subscription:
            if name != "outside":
                held = await claim_one(storage)
                if name == "chain":
                    await apply(storage, continued(held, keep=DROP))
                    held = await claim_one(storage)
                await apply(storage, completed(held, result))
            else:
                await storage.complete(name, result)
            told = await _end_told(subscription)
        assert (told.kind, told.job_id, told.result) == (KIND.COMPLETED, name, result)
        if name != "soon":
            assert await state(storage, name) is None


@case(guarantees=(6, 20))
async def a_large_result_waits_to_be_read(harness: Harness, storage: Storage) -> None:
    """One of more than 4 KiB is kept for a minute at least, however short its job is to be kept, unless nothing is."""
    large = b"x" * 4_097
    await enqueue(storage, *(job(name, keep=harness.moment) for name in ("short", "chosen", "outside", "dropped")))
    short, chosen, outside, dropped = await claim(storage, 4)
    await apply(storage, completed(short, large), completed(chosen, large, keep=harness.moment))
    async with storage.subscribe("dropped") as subscription:
        await apply(storage, completed(dropped, large, keep=DROP))
        assert (await _end_told(subscription)).result is None
    ended = [short.job_id, chosen.job_id]
    if harness.capabilities.outside_endings:
        await storage.complete(outside.job_id, large)
        ended.append(outside.job_id)
    assert await state(storage, "dropped") is None
    await harness.advance(harness.moment * 2)
    for name in ended:
        assert await storage.result(name) == JobOutcome(kind=OutcomeKind.COMPLETED, result=large)
    if harness.moves_time and harness.capabilities.retention_per_job:
        await harness.advance(timedelta(minutes=1))
        assert [await storage.result(name) for name in ended] == [None] * len(ended)


async def _end_told(subscription: Subscription) -> JobEvent:
    async with asyncio.timeout(PATIENCE):
        while (event := await subscription.get()).kind not in TERMINAL_EVENTS:
            pass
    return event


async def _read_at_the_end(storage: Storage, subscription: Subscription, number: int) -> None:
    await expect(subscription, KIND.ACTIVE, KIND.COMPLETED)
    assert await storage.result(f"job-{number}") is not None
