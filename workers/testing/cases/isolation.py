"""The independence of queues and clients on one storage."""

from __future__ import annotations

import asyncio

from workers.jobs import JobEventKind, JobState, SettleStatus
from workers.storage.base import Storage
from workers.testing.case import case
from workers.testing.harness import Harness
from workers.testing.steps import (
    apply,
    background,
    claim,
    claim_one,
    completed,
    crash,
    enqueue,
    expect,
    job,
    next_claim,
    recover,
    state,
)


@case(guarantees=(14,))
async def queues_share_nothing(harness: Harness) -> None:
    """The same id in two queues is two jobs; pausing, draining and recovering one queue leaves the other alone."""
    left, right = await harness.open(), await harness.open()
    await enqueue(left, job("same", payload=b"left"))
    await enqueue(right, job("same", payload=b"right"))
    assert [held.payload for held in await claim(left, 5)] == [b"left"]
    assert await state(right, "same") is JobState.QUEUED
    await left.pause()
    assert await left.drain() == 0
    assert await left.cancel("unknown") == "not_found"
    assert [held.payload for held in await claim(right, 5)] == [b"right"]
    assert (await left.counts())[JobState.PROCESSING] == 1


@case(guarantees=(3, 14))
async def a_claim_is_good_in_its_queue_alone(harness: Harness) -> None:
    """Another queue neither renews nor settles a claim, even if it holds a job of the same id."""
    left, right = await harness.open(), await harness.open()
    await enqueue(left, job("same"), job("only left"))
    await enqueue(right, job("same"))
    same, only_left = await claim(left, 5)
    theirs = await claim_one(right)
    assert set((await right.renew([same, only_left])).lost) == {same.token, only_left.token}
    outcomes = await right.settle([completed(same, b"stray"), completed(only_left, b"stray")])
    assert [outcome.status for outcome in outcomes] == [SettleStatus.LOST] * 2
    await apply(left, completed(same), completed(only_left))
    await apply(right, completed(theirs))


@case(guarantees=(14,))
async def recovery_stays_in_its_queue(harness: Harness) -> None:
    """A reaper of one queue never touches another queue's jobs."""
    left, right = await harness.open(), await harness.open()
    await enqueue(left, job("left"))
    await enqueue(right, job("right"))
    await crash(harness, left)
    await crash(harness, right)
    assert (await recover(harness, left, 1)).requeued == ("left",)
    assert await state(right, "right") is JobState.PROCESSING


@case(guarantees=(14,))
async def similar_queue_names_are_different(harness: Harness) -> None:
    """Queues whose names contain each other or look like patterns share nothing."""
    base = harness.unique_queue()
    storages = [await harness.open(f"{base}{suffix}") for suffix in ("", "-", "-1", "_", "-%")]
    await enqueue(storages[0], job("only here"))
    assert [len(await claim(storage, 5)) for storage in storages[1:]] == [0, 0, 0, 0]
    assert len(await claim(storages[0], 5)) == 1


@case(guarantees=(14,))
async def closing_one_client_leaves_the_others(harness: Harness, storage: Storage) -> None:
    """A client that disconnects takes nothing from others of the same or another queue: claims, waits, events."""
    same, different = await harness.open(storage.queue), await harness.open()
    await enqueue(storage, job("held"))
    held = await claim_one(storage)
    waiting = asyncio.create_task(next_claim(different))
    async with storage.subscribe("held") as subscription, background(waiting):
        await asyncio.sleep(0.03)
        await harness.shut(same)
        await apply(storage, completed(held, b"1"))
        await expect(subscription, JobEventKind.COMPLETED)
        await enqueue(different, job("elsewhere"))
        assert (await waiting).job_id == "elsewhere"


@case(guarantees=(14,))
async def connecting_is_counted(harness: Harness, storage: Storage) -> None:
    """A client that was connected twice works until it is disconnected twice, and can be connected again."""
    await storage.connect()
    await storage.disconnect()
    await enqueue(storage, job("job"))
    await harness.shut(storage)
    await storage.connect()
    try:
        assert await state(storage, "job") is JobState.QUEUED
    finally:
        await storage.disconnect()
