"""The promises of `wait`: no lost wake-up, and no spinning."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import Final

from workers.jobs import Claim
from workers.storage.abilities import HoldsWakeUps
from workers.storage.base import Storage
from workers.testing.case import HELD_WAKE_UPS, NAME_FILTER, ORDERING_KEYS, case
from workers.testing.harness import Harness
from workers.testing.steps import (
    HOUR,
    LEASE,
    PATIENCE,
    apply,
    background,
    claim,
    claim_one,
    completed,
    crash,
    enqueue,
    failed,
    job,
    next_claim,
    recover,
    released,
    retried,
)

SETTLE_IN: Final = 0.03
"""Seconds given to a wait to be asleep; it must work without, which other cases show."""


async def _wakes(storage: Storage, job_id: str, happen: Callable[[], Awaitable[object]]) -> Claim:
    """Check that a worker that sleeps on `storage` gets the job when `happen` makes it claimable."""
    worker = asyncio.create_task(next_claim(storage))
    async with background(worker):
        await asyncio.sleep(SETTLE_IN)
        assert not worker.done(), "nothing was claimable yet"
        await happen()
        held = await worker
    assert held.job_id == job_id
    return held


@case(guarantees=(19,))
async def a_job_that_is_there_needs_no_waiting(storage: Storage) -> None:
    """A wait that begins when a job is already claimable returns at once."""
    await enqueue(storage, job())
    async with asyncio.timeout(PATIENCE):
        await storage.wait(["*"], timeout=HOUR)
    await claim_one(storage)


@case(guarantees=(19,))
async def an_enqueue_wakes(harness: Harness, storage: Storage) -> None:
    """A worker asleep gets a job that another client enqueues."""
    producer = await harness.open(storage.queue)
    await _wakes(storage, "new", lambda: enqueue(producer, job("new")))


@case(guarantees=(19,))
async def no_wake_up_is_lost_in_a_race(harness: Harness, storage: Storage) -> None:
    """When a wait and an enqueue begin at the same moment, 50 times, the job is found every time."""
    producer = await harness.open(storage.queue)
    for number in range(50):
        held, _ = await asyncio.gather(next_claim(storage), enqueue(producer, job(f"job-{number}")))
        assert held.job_id == f"job-{number}"
        await apply(storage, completed(held))


@case(guarantees=(19,))
async def every_waiting_worker_is_served(harness: Harness, storage: Storage) -> None:
    """When three workers are asleep and three jobs come in one batch, each worker gets one."""
    others = [await harness.open(storage.queue) for _ in range(2)]
    workers = [asyncio.create_task(next_claim(each)) for each in (storage, *others)]
    async with background(*workers):
        await asyncio.sleep(SETTLE_IN)
        await enqueue(others[0], *(job(f"job-{number}") for number in range(3)))
        claims = await asyncio.gather(*workers)
    assert sorted(held.job_id for held in claims) == ["job-0", "job-1", "job-2"]


@case(guarantees=(16, 19))
async def a_delay_running_out_wakes(harness: Harness, storage: Storage) -> None:
    """A worker asleep gets a delayed job when it is due, whether it was enqueued before the wait or during it."""
    await enqueue(storage, job("before", delay=harness.moment))
    await _wakes(storage, "before", lambda: harness.advance(harness.moment))

    async def enqueue_and_come_due() -> None:
        await enqueue(storage, job("during", delay=harness.moment))
        await asyncio.sleep(0)
        await harness.advance(harness.moment)

    await _wakes(storage, "during", enqueue_and_come_due)


@case(guarantees=(16, 19))
async def a_nearer_delay_shortens_the_sleep(harness: Harness, storage: Storage) -> None:
    """A worker that sleeps until a far delay is woken by a nearer one."""
    await enqueue(storage, job("far", delay=HOUR))

    async def enqueue_nearer() -> None:
        await enqueue(storage, job("near", delay=harness.moment))
        await harness.advance(harness.moment)

    await _wakes(storage, "near", enqueue_nearer)


@case(guarantees=(19,))
async def a_release_wakes(storage: Storage, other: Storage) -> None:
    """A worker asleep gets a job that another worker gives back."""
    await enqueue(storage, job("given back"))
    held = await claim_one(other)
    await _wakes(storage, "given back", lambda: apply(other, released(held)))


@case(guarantees=(16, 19))
async def a_retry_wakes(harness: Harness, storage: Storage, other: Storage) -> None:
    """A worker asleep gets a job that is retried at once, and one that is retried after a delay."""
    await enqueue(storage, job("again"))
    held = await claim_one(other)
    held = await _wakes(storage, "again", lambda: apply(other, retried(held)))

    async def retry_and_come_due() -> None:
        await apply(other, retried(held, harness.moment))
        await harness.advance(harness.moment)

    await _wakes(storage, "again", retry_and_come_due)


@case(guarantees=(15, 19), needs=(ORDERING_KEYS,))
async def a_freed_ordering_key_wakes(storage: Storage, other: Storage) -> None:
    """A worker asleep gets the next job of an ordering key when the running one completes."""
    await enqueue(storage, *(job(name, ordering_key="key") for name in ("first", "second")))
    held = await claim_one(other)
    assert await claim(other, 10) == []
    await _wakes(storage, "second", lambda: apply(other, completed(held)))


@case(guarantees=(5, 19))
async def a_recovery_wakes(harness: Harness, storage: Storage) -> None:
    """A worker asleep gets a job that the reaper brings back."""
    reaper = await harness.open(storage.queue)
    await enqueue(storage, job("brought back"))
    await crash(harness, reaper)
    await _wakes(storage, "brought back", lambda: recover(harness, reaper, 1))


@case(guarantees=(19, 22))
async def resume_promote_and_manual_retry_wake(storage: Storage, other: Storage) -> None:
    """A worker asleep gets the jobs that `resume`, `promote` and `retry` make claimable."""
    assert not await storage.is_paused()
    await other.pause()
    assert await storage.is_paused()
    await enqueue(other, job("held up"))
    held = await _wakes(storage, "held up", other.resume)
    assert not await storage.is_paused()
    await apply(storage, completed(held))
    await enqueue(other, job("promoted", delay=HOUR))
    held = await _wakes(storage, "promoted", lambda: other.promote(["promoted"]))
    await apply(storage, failed(held))
    await _wakes(storage, "promoted", lambda: other.retry(["promoted"]))


@case(guarantees=(13,))
async def an_idle_wait_does_not_spin(harness: Harness) -> None:
    """With nothing to claim, waits of 0.2 s return a few times in half a second, not thousands of times.

    There is nothing to claim in an empty queue, with only a far or the farthest delay, with a job that is processing,
    and in a paused queue.
    """
    empty, delayed, remote, busy, paused = [await harness.open() for _ in range(5)]
    await enqueue(delayed, job(delay=HOUR))
    await enqueue(remote, job(delay=remote.capabilities.longest_delay))
    await enqueue(busy, job())
    await claim_one(busy)
    await paused.pause()
    await enqueue(paused, job())
    waits = await asyncio.gather(*(_waits_in(each, 0.5) for each in (empty, delayed, remote, busy, paused)))
    assert max(waits) <= 10, f"waits ended (empty, delayed, remote, busy, paused): {waits}"


@case(guarantees=(13,), needs=(NAME_FILTER,))
async def unwanted_names_do_not_spin(storage: Storage) -> None:
    """A backlog of names that this worker does not handle does not wake it up."""
    await enqueue(storage, *(job(name="other") for _ in range(10)))
    assert await _waits_in(storage, 0.5, name="mine") <= 10


@case(guarantees=(19,), needs=(NAME_FILTER,))
async def a_wake_up_reaches_who_can_claim(storage: Storage) -> None:
    """Of several workers asleep on one client, the one that handles the job gets it, whoever went to sleep first."""
    names = ("alpha", "beta", "gamma")
    workers = [asyncio.create_task(next_claim(storage, leases={name: LEASE})) for name in names]
    async with background(*workers):
        await asyncio.sleep(SETTLE_IN)
        for name in reversed(names):
            await enqueue(storage, job(name, name=name))
            held = await workers[names.index(name)]
            assert held.job_id == name


@case(guarantees=(19,))
async def a_cancelled_wait_leaves_nothing(storage: Storage) -> None:
    """A wait can be cancelled, and the next one on the same client works."""
    waiting = asyncio.create_task(storage.wait(["*"], timeout=HOUR))
    await asyncio.sleep(SETTLE_IN)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled()
    await _wakes(storage, "after", lambda: enqueue(storage, job("after")))


async def _waits_in(storage: Storage, seconds: float, *, name: str = "*") -> int:
    """Count the claim-and-wait rounds of an idle worker that end within the time."""
    clock = asyncio.get_running_loop().time
    until, rounds = clock() + seconds, 0
    while clock() < until:
        assert await storage.claim("idle", leases={name: LEASE}, limit=1) == []
        await storage.wait([name], timeout=timedelta(seconds=0.2))
        rounds += 1
    return rounds


@case(guarantees=(19,), needs=(HELD_WAKE_UPS,))
async def a_held_wake_up_comes_at_the_end(storage: Storage) -> None:
    """A block of `with_notify` wakes workers of all names that it enqueued when it ends, also by an error."""
    for fails in (False, True):
        workers = [asyncio.create_task(next_claim(storage, leases={name: LEASE})) for name in "abc"]
        async with background(*workers):
            await asyncio.sleep(SETTLE_IN)
            try:
                async with _holding(storage):
                    await enqueue(
                        storage, *(job(name=name, ordering_key="k" if name == "a" else None) for name in "ab")
                    )
                    await enqueue(storage, job(name="c"), job("later", name="a", delay=HOUR))
                    if fails:
                        raise ZeroDivisionError
            except ZeroDivisionError:
                assert fails
            claims = await asyncio.gather(*workers)
        assert sorted(held.name for held in claims) == ["a", "b", "c"]
        await apply(storage, *map(completed, claims))
        assert await storage.remove(["later"]) == 1


@case(guarantees=(16, 19), needs=(HELD_WAKE_UPS,))
async def a_held_wake_up_is_about_delayed_jobs_too(harness: Harness, storage: Storage) -> None:
    """A worker that slept when a delayed job came in such a block gets it when it is due."""
    worker = asyncio.create_task(next_claim(storage))
    async with background(worker):
        await asyncio.sleep(SETTLE_IN)
        async with _holding(storage):
            await enqueue(storage, job("soon", delay=harness.moment))
        await asyncio.sleep(SETTLE_IN)
        await harness.advance(harness.moment)
        assert (await worker).job_id == "soon"


@case(guarantees=(19,), needs=(HELD_WAKE_UPS,))
async def others_wake_while_a_block_is_open(storage: Storage) -> None:
    """An enqueue of somebody else wakes at once, and so does one by a task of the block when that has ended."""
    begin, went_on = asyncio.Event(), asyncio.Event()

    async def go_on() -> None:
        await went_on.wait()
        await enqueue(storage, job("of its task"))

    async def somebody_else() -> None:
        await begin.wait()
        await enqueue(storage, job("of another"))

    tasks = [asyncio.create_task(somebody_else())]
    async with background(*tasks):
        async with _holding(storage):
            async with _holding(storage):
                pass
            tasks.append(asyncio.create_task(go_on()))
            await _wakes(storage, "of another", lambda: _set(begin))
        await _wakes(storage, "of its task", lambda: _set(went_on))
        await asyncio.gather(*tasks)


def _holding(storage: Storage) -> AbstractAsyncContextManager[None]:
    assert isinstance(storage, HoldsWakeUps)
    return storage.with_notify()


async def _set(event: asyncio.Event) -> None:
    event.set()
