"""The promises of priorities above the default."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Final

from workers.checks import MAX_PRIORITY, MIN_PRIORITY
from workers.errors import Unsupported
from workers.jobs import JobState, SettleStatus
from workers.storage.base import Storage
from workers.testing.case import (
    LIMIT_KEYS,
    MEASURES,
    NAME_FILTER,
    ORDERING_KEYS,
    PRIORITY_ORDER,
    URGENT_PRIORITIES,
    case,
)
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
    continued,
    crash,
    enqueue,
    failed,
    ids,
    job,
    next_claim,
    recover,
    released,
    retried,
    settle,
    state,
    status,
)

SETTLE_IN: Final = 0.03
"""Seconds given to a wait to be asleep."""


@case(guarantees=(15,), needs=(PRIORITY_ORDER, URGENT_PRIORITIES))
async def urgent_jobs_come_first(storage: Storage) -> None:
    """A priority below 0 is above the default, and -1 000 above all; of one priority the oldest goes first."""
    await enqueue(storage, job("one", priority=1), job("zero"), job("soon", priority=-1), job("soon too", priority=-1))
    await enqueue(storage, job("at once", priority=MIN_PRIORITY), job("last", priority=MAX_PRIORITY))
    await enqueue(storage, job("almost", priority=MIN_PRIORITY + 1, name="other"))
    assert (await status(storage, "at once")).priority == MIN_PRIORITY
    [first] = await claim(storage)
    assert (first.job_id, first.priority) == ("at once", MIN_PRIORITY)
    assert ids(await claim(storage, 10)) == ["almost", "soon", "soon too", "zero", "one", "last"]


@case(guarantees=(15, 17), needs=(PRIORITY_ORDER, URGENT_PRIORITIES, NAME_FILTER))
async def an_urgent_job_has_its_name(storage: Storage) -> None:
    """A claim for some names brings the urgent jobs of these names, first, by their own lease, and no others."""
    await enqueue(storage, job("a0", name="a"), job("b0", name="b"), job("c", name="c", priority=-5))
    await enqueue(storage, job("b1", name="b", priority=-1), job("a2", name="a", priority=-2))
    leases = {"a": 2 * LEASE, "b": LEASE}
    claims = await storage.claim("w", leases=leases, limit=3)
    assert [(held.job_id, held.name, held.lease) for held in claims] == [
        *(("a2", "a", 2 * LEASE), ("b1", "b", LEASE), ("a0", "a", 2 * LEASE)),
    ]
    assert ids(await storage.claim("w", leases=leases, limit=3)) == ["b0"]
    assert ids(await storage.claim("w", leases={"*": LEASE}, limit=3)) == ["c"]


@case(guarantees=(15, 16), needs=(PRIORITY_ORDER, URGENT_PRIORITIES))
async def an_urgent_job_stays_urgent(harness: Harness, storage: Storage) -> None:
    """Released, recovered, retried, delayed, promoted, or as the next link of a chain, it goes before what waits."""
    await enqueue(storage, job("waits"), job("urgent", priority=-7), job("waits too"))
    await apply(storage, released(await claim_one(storage)))
    await crash(harness, storage)
    await recover(harness, storage, 1)
    await apply(storage, retried(await claim_one(storage), harness.moment))
    await harness.advance(harness.moment)
    await apply(storage, retried(await claim_one(storage), HOUR))
    assert await storage.promote(["urgent"]) == 1
    held = await claim_one(storage)
    assert (held.job_id, held.priority) == ("urgent", -7)
    await apply(storage, continued(held, delay=harness.moment, priority=-3))
    await harness.advance(harness.moment)
    claims = await claim(storage, 10)
    assert [(held.job_id, held.priority) for held in claims] == [("urgent", -3), ("waits", 0), ("waits too", 0)]


@case(guarantees=(21, 22), needs=(URGENT_PRIORITIES,))
async def urgent_jobs_are_seen_and_managed(storage: Storage) -> None:
    """They are counted and listed, and can be cancelled, removed, retried and drained, also while delayed."""
    names = [f"job-{number}" for number in range(6)]
    await enqueue(storage, *(job(name, priority=-number - 1) for number, name in enumerate(names)))
    await enqueue(storage, job("later", priority=-9, delay=HOUR))
    assert (await storage.counts())[JobState.QUEUED] == len(names)
    assert await storage.waiting_since() is not None
    assert sorted(one.id for one in (await storage.list(JobState.QUEUED)).jobs) == names
    await storage.cancel("job-5")
    assert await storage.remove(["job-4"]) == 1
    held = await claim_one(storage)
    assert held.job_id == "job-3"
    await apply(storage, failed(held))
    assert await storage.retry(["job-3", "job-5"]) == 2
    assert ids(await claim(storage, 2)) == ["job-5", "job-3"]
    assert await storage.drain() == 4
    assert await claim(storage, 10) == []
    assert await state(storage, "later") is None


@case(guarantees=(12,), needs=(URGENT_PRIORITIES, MEASURES))
async def urgent_jobs_leave_nothing_behind(harness: Harness, storage: Storage) -> None:
    """When they have come, gone and been cancelled, the storage holds what it held before."""
    await enqueue(storage, job(priority=-1))
    await apply(storage, completed(await claim_one(storage), keep=harness.moment))
    await harness.advance(harness.moment)
    await storage.sweep(100)
    before = await harness.entries(storage)
    for number in range(3):
        await enqueue(storage, *(job(f"job-{at}", priority=-at, keep=harness.moment) for at in range(1, 5)))
        await storage.cancel("job-4")
        await apply(storage, *map(completed, await claim(storage, 2)))
        assert await storage.remove(["job-1"]) == 1, f"round {number}"
        await harness.advance(harness.moment)
        await storage.sweep(100)
    assert await harness.entries(storage) == before


@case(guarantees=(19,), needs=(URGENT_PRIORITIES, NAME_FILTER))
async def an_urgent_job_wakes(harness: Harness, storage: Storage) -> None:
    """A worker that waits for its name gets it, at once or as soon as it is due; a wait for it does not begin."""
    producer = await harness.open(storage.queue)
    leases = {"mine": LEASE}
    for job_id, delay in (("now", timedelta(0)), ("due", harness.moment)):
        worker = asyncio.create_task(next_claim(storage, leases=leases))
        async with background(worker):
            await asyncio.sleep(SETTLE_IN)
            assert not worker.done(), "nothing was claimable yet"
            await enqueue(producer, job(job_id, name="mine", priority=-1, delay=delay))
            await harness.advance(delay)
            assert (await worker).job_id == job_id
    await enqueue(producer, job("there", name="mine", priority=-1))
    async with asyncio.timeout(PATIENCE):
        await storage.wait(["mine"], timeout=HOUR)


@case(guarantees=(15,), needs=(PRIORITY_ORDER, URGENT_PRIORITIES, ORDERING_KEYS))
async def an_urgent_job_of_a_key_is_the_next(storage: Storage) -> None:
    """It does not overtake the job of its ordering key that runs, but all that wait for it."""
    await enqueue(storage, *(job(name, ordering_key="a") for name in ("first", "second", "third")))
    held = await claim_one(storage)
    assert await claim(storage, 10) == []
    await enqueue(
        storage, job("urgent", ordering_key="a", priority=-1), job("urgent too", ordering_key="a", priority=-1)
    )
    assert await claim(storage, 10) == []
    order: list[str] = []
    while len(order) < 4:
        await apply(storage, completed(held))
        held = (await claim(storage, 10))[0]
        order.append(held.job_id)
    assert order == ["urgent", "urgent too", "second", "third"]


@case(guarantees=(15, 27), needs=(PRIORITY_ORDER, URGENT_PRIORITIES, LIMIT_KEYS))
async def an_urgent_job_of_a_fair_key_is_its_next(storage: Storage) -> None:
    """When the next of a fair key has had its turn, its urgent job goes before all others, of any key."""
    await enqueue(storage, *(job(f"a{at}", fair_key="a") for at in range(1, 4)), job("b1", fair_key="b"))
    await enqueue(storage, job("urgent", fair_key="a", priority=-1))
    found: list[str] = []
    async with asyncio.timeout(PATIENCE):
        while len(found) < 5:
            found += ids(await claim(storage, 1))
    assert found.index("urgent") < found.index("a2") < found.index("a3")
    assert found.index("urgent") <= 1


@case(guarantees=(24,))
async def a_storage_without_urgent_priorities_says_so(harness: Harness, storage: Storage) -> None:
    """Where they are declared away, they are refused with `Unsupported`: of a batch nothing is inserted.

    The next link of a chain that has one is not stored either, and its attempt goes on.
    """
    try:
        await enqueue(storage, job("plain"), job("urgent", priority=-1))
    except Unsupported:
        assert not harness.capabilities.urgent_priorities
        assert await storage.status(["plain", "urgent"]) == [None, None]
        await enqueue(storage, job("chain"))
        held = await claim_one(storage)
        assert (await settle(storage, continued(held, priority=-1))).status is SettleStatus.ERROR
        assert await state(storage, "chain") is JobState.PROCESSING
    else:
        assert harness.capabilities.urgent_priorities
