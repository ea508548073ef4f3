"""Restarts: the server behind a storage, the connections to it, or all its clients go away and come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Final, TypeAlias, TypeVar

from workers.errors import StorageUnavailable
from workers.jobs import Claim, Continued, JobEvent, JobEventKind, JobOutcome, JobState, OutcomeKind, SettleStatus
from workers.storage.abilities import ContinuesFromOutside
from workers.storage.base import Storage, Subscription
from workers.testing.case import (
    CUTS,
    DEPENDENCIES,
    DURABLE,
    FREEZES,
    OUTSIDE_CONTINUATIONS,
    RESTARTS,
    SWALLOWS,
    case,
)
from workers.testing.harness import Harness
from workers.testing.steps import (
    HOUR,
    PATIENCE,
    apply,
    background,
    claim,
    claim_one,
    completed,
    enqueue,
    failed,
    ids,
    job,
    retried,
    state,
)

T = TypeVar("T")

SILENCE: Final = 15.0 + PATIENCE
"""So long after a server or its connections went silent, work goes on over others: 15 s, on a busy machine more."""

Disturbance: TypeAlias = Callable[[], Awaitable[None]]


async def _in_time(call: Callable[[], Awaitable[T]], patience: float = PATIENCE) -> T:
    """Return what the call answers, repeated on `StorageUnavailable` for a while, as a worker does."""
    async with asyncio.timeout(patience):
        while True:
            try:
                return await call()
            except StorageUnavailable:
                await asyncio.sleep(0.05)


async def _verbs_go_on(harness: Harness, disturb: Disturbance, patience: float = PATIENCE) -> None:
    """Check that the same clients go on after it: jobs, claims and delays are as they were."""
    storage = await harness.open()
    await enqueue(storage, job("held"), job("queued"), job("scheduled", delay=HOUR))
    held = await claim_one(storage)
    await disturb()
    assert await _in_time(lambda: state(storage, "queued"), patience) is JobState.QUEUED
    assert await _in_time(lambda: state(storage, "scheduled")) is JobState.SCHEDULED
    assert (await _in_time(lambda: storage.renew([held]))).lost == {}
    await _in_time(lambda: apply(storage, completed(held, b"1")))
    assert (await _in_time(lambda: claim_one(storage))).job_id == "queued"


async def _a_wait_goes_on(harness: Harness, disturb: Disturbance, patience: float = 2 * PATIENCE) -> None:
    """Check that a worker asleep meanwhile gets the next job."""
    storage = await harness.open()
    producer = await harness.open(storage.queue)
    worker = asyncio.create_task(_claim_at_last(storage))
    async with background(worker):
        await asyncio.sleep(0.03)
        await disturb()
        async with asyncio.timeout(patience):
            await _in_time(lambda: producer.enqueue([job("after")]), patience)
            assert (await worker).job_id == "after"


async def _claim_at_last(storage: Storage) -> Claim:
    """Return the next claim, however long the server is away; no wait is so short that it hides a lost wake-up."""
    while True:
        with suppress(StorageUnavailable):
            while not (claims := await claim(storage)):
                await storage.wait(("*",), timeout=timedelta(seconds=4 * SILENCE))
            return claims[0]
        await asyncio.sleep(0.05)


async def _a_subscription_goes_on(harness: Harness, disturb: Disturbance, patience: float = PATIENCE) -> None:
    """Check that a subscriber from before hears of what happens after it."""
    storage = await harness.open()
    async with storage.events() as subscription:
        await disturb()
        heard = asyncio.create_task(subscription.get())
        async with background(heard), asyncio.timeout(patience):
            while not heard.done():
                await _in_time(lambda: storage.enqueue([job()]), patience)
                await asyncio.wait([heard], timeout=0.1)
            assert (await heard).kind is JobEventKind.QUEUED


@case(guarantees=(7, 11), needs=(RESTARTS,))
async def cancel_requests_are_heard_after_a_restart(harness: Harness, storage: Storage) -> None:
    """A worker that listened before the restart hears of the cancel requests made after it."""
    await enqueue(storage, job("running"))
    await claim_one(storage)
    async with storage.cancel_requests() as requests:
        await harness.restart_server()
        heard = asyncio.create_task(_next_request(storage, requests))
        async with background(heard), asyncio.timeout(PATIENCE):
            while not heard.done():
                await _in_time(lambda: storage.cancel("running"))
                await asyncio.wait([heard], timeout=0.1)
            assert (await heard).job_id == "running"


async def _next_request(storage: Storage, requests: Subscription) -> JobEvent:
    """Return what a worker hears next; if it is told that it may have missed something, it listens again."""
    try:
        return await requests.get()
    except StorageUnavailable:
        return await _in_time(lambda: _first_request(storage))


async def _first_request(storage: Storage) -> JobEvent:
    async with storage.cancel_requests() as requests:
        return await requests.get()


@case(guarantees=(7, 11), needs=(CUTS,))
async def no_cancel_request_is_lost_in_silence(harness: Harness, storage: Storage, other: Storage) -> None:
    """A worker whose connections are cut hears of a request made meanwhile, or that it may have missed one."""
    await enqueue(storage, job("running"))
    await claim_one(storage)
    async with storage.cancel_requests() as requests:
        await harness.cut_connections()
        await _in_time(lambda: other.cancel("running"))
        async with asyncio.timeout(PATIENCE):
            with suppress(StorageUnavailable):
                assert (await requests.get()).job_id == "running"


@case(guarantees=(1, 11), needs=(RESTARTS,))
async def every_verb_works_after_a_restart(harness: Harness) -> None:
    """After a restart the same clients go on: jobs, claims and delays are as they were."""
    await _verbs_go_on(harness, harness.restart_server)


@case(guarantees=(11, 19), needs=(RESTARTS,))
async def a_wait_survives_a_restart(harness: Harness) -> None:
    """A worker asleep during a restart gets the next job, without being started again."""
    await _a_wait_goes_on(harness, harness.restart_server)


@case(guarantees=(11, 20), needs=(RESTARTS,))
async def a_subscription_survives_a_restart(harness: Harness) -> None:
    """A subscriber from before the restart hears of what happens after it, without subscribing again."""
    await _a_subscription_goes_on(harness, harness.restart_server)


@case(guarantees=(11,), needs=(CUTS,))
async def every_verb_works_after_a_cut(harness: Harness) -> None:
    """When all connections are cut and all scripts forgotten, the same clients go on."""
    await _verbs_go_on(harness, harness.cut_connections)


@case(guarantees=(11, 19), needs=(CUTS,))
async def a_wait_survives_a_cut(harness: Harness) -> None:
    """A worker asleep when its connections are cut, the listening one too, gets the next job."""
    await _a_wait_goes_on(harness, harness.cut_connections)


@case(guarantees=(11, 20), needs=(CUTS,))
async def a_subscription_survives_a_cut(harness: Harness) -> None:
    """A subscriber whose listening connection is cut hears of what happens after it."""
    await _a_subscription_goes_on(harness, harness.cut_connections)


@case(guarantees=(11,), needs=(SWALLOWS,))
async def every_verb_works_after_a_silence(harness: Harness) -> None:
    """When all connections have gone silent, and none was closed, the same clients go on over others."""
    await _verbs_go_on(harness, harness.swallow, SILENCE)


@case(guarantees=(11, 19), needs=(SWALLOWS,))
async def a_wait_survives_a_silence(harness: Harness) -> None:
    """A worker asleep when its connections go silent, the listening one too, gets the next job."""
    await _a_wait_goes_on(harness, harness.swallow, SILENCE)


@case(guarantees=(11, 20), needs=(SWALLOWS,))
async def a_subscription_survives_a_silence(harness: Harness) -> None:
    """A subscriber whose listening connection goes silent hears of what happens after it."""
    await _a_subscription_goes_on(harness, harness.swallow, SILENCE)


@case(guarantees=(3, 11), needs=(SWALLOWS,))
async def what_was_claimed_and_not_read_is_given_back(harness: Harness, storage: Storage) -> None:
    """When the answer to a claim stops after half, its job is there at the next claim, and no attempt is counted."""
    await enqueue(storage, job("large", payload=b"x" * 1_000_000))
    await harness.swallow_answers(500_000)
    async with asyncio.timeout(SILENCE):
        try:
            claims = await claim(storage)
        except StorageUnavailable:
            claims = []
    assert claims == []
    await harness.swallow_answers(None)
    claimed = await _in_time(lambda: claim_one(storage), SILENCE)
    assert (claimed.job_id, claimed.attempt, claimed.stalled) == ("large", 1, None)


@asynccontextmanager
async def _frozen(harness: Harness) -> AsyncIterator[None]:
    """Freeze the server until the end of the block."""
    await harness.freeze_server()
    try:
        yield
    finally:
        await harness.thaw_server()


@case(guarantees=(1, 2, 11), needs=(FREEZES,))
async def what_a_frozen_server_was_told_is_unknown(harness: Harness, storage: Storage) -> None:
    """Each enqueue at a server that freezes is answered, or unavailable in time; repeated, its job is there once."""
    names = [f"job-{number:02}" for number in range(50)]
    producing = [asyncio.create_task(storage.enqueue([job(name)])) for name in names]
    async with background(*producing):
        await asyncio.wait(producing, return_when=asyncio.FIRST_COMPLETED)
        async with _frozen(harness), asyncio.timeout(2 * SILENCE):
            answers = await asyncio.gather(*producing, return_exceptions=True)
        assert {type(answer) for answer in answers} <= {list, StorageUnavailable}, answers
    told = [name for name, answer in zip(names, answers, strict=True) if isinstance(answer, list)]
    found = await _in_time(lambda: storage.status(told), SILENCE)
    assert all(status is not None for status in found)
    await _in_time(lambda: storage.enqueue([job(name) for name in names]), SILENCE)
    assert sorted(ids(await claim(storage, 100))) == names


@case(guarantees=(11,), needs=(FREEZES,))
async def a_frozen_server_is_an_absent_one(harness: Harness, storage: Storage) -> None:
    """While the server is frozen, verbs raise `StorageUnavailable` in time; when it goes on, so do the same clients."""
    await enqueue(storage, job("held"))
    held = await claim_one(storage)
    async with _frozen(harness):
        verbs = (
            storage.enqueue([job()]),
            storage.claim("another", leases={"*": HOUR}, limit=1),
            storage.renew([held]),
            storage.settle([completed(held)]),
            storage.status(["held"]),
        )
        async with asyncio.timeout(2 * SILENCE):
            answers = await asyncio.gather(*verbs, return_exceptions=True)
        assert [type(answer) for answer in answers] == [StorageUnavailable] * len(verbs)
    (outcome,) = await _in_time(lambda: storage.settle([completed(held)]), SILENCE)
    assert outcome.status in {SettleStatus.APPLIED, SettleStatus.ALREADY_APPLIED}


@case(guarantees=(11,), needs=(FREEZES,))
async def clients_can_leave_a_frozen_server(harness: Harness, storage: Storage) -> None:
    """Whoever has asked a frozen server something, and waits no longer, can disconnect."""
    async with _frozen(harness):
        asking = [asyncio.create_task(storage.enqueue([job()])) for _ in range(3)]
        await asyncio.sleep(0.05)
        for task in asking:
            task.cancel()
        async with asyncio.timeout(SILENCE):
            await asyncio.gather(*asking, return_exceptions=True)
            await harness.shut(storage)


@case(guarantees=(1, 3, 6, 11), needs=(DURABLE,))
async def a_reopened_queue_is_as_it_was(harness: Harness, storage: Storage) -> None:
    """When all clients were closed and new ones opened, all is there: jobs, claims, results, cancels, the pause."""
    await enqueue(storage, job("done"), job("bad"), job("held"), job("retried"), job("cancelled"), job("queued"))
    await enqueue(storage, job("scheduled", delay=HOUR))
    claims = {held.job_id: held for held in await claim(storage, 4)}
    settlements = (completed(claims["done"], b"1"), failed(claims["bad"]), retried(claims["retried"], HOUR))
    await apply(storage, *settlements)
    await storage.cancel("cancelled")
    await storage.pause()
    await harness.shut(storage)

    storage = await harness.open(storage.queue)
    names = ("done", "bad", "held", "retried", "cancelled", "queued", "scheduled")
    states = [None if found is None else found.state.value for found in await storage.status(names)]
    assert states == ["completed", "failed", "processing", "failing", "cancelled", "queued", "scheduled"]
    assert await storage.result("done") == JobOutcome(kind=OutcomeKind.COMPLETED, result=b"1")
    assert await storage.result("cancelled") == JobOutcome(kind=OutcomeKind.CANCELLED)
    assert [outcome.status for outcome in await storage.settle(settlements)] == [SettleStatus.ALREADY_APPLIED] * 3
    assert await claim(storage) == []
    await storage.resume()
    assert (await storage.renew([claims["held"]])).lost == {}
    await apply(storage, completed(claims["held"]))
    assert (await claim_one(storage)).job_id == "queued"


@case(guarantees=(1, 11), needs=(DURABLE, OUTSIDE_CONTINUATIONS))
async def a_link_from_outside_is_there_when_reopened(harness: Harness, storage: Storage) -> None:
    """A chain that went on from outside is claimed as its new link by whoever opens the queue afterwards."""
    await enqueue(storage, job("chain"))
    assert isinstance(storage, ContinuesFromOutside)
    await storage.continue_job(job("chain", name="next", payload=b"2", chain_index=1))
    await harness.shut(storage)
    held = await claim_one(await harness.open(storage.queue))
    assert (held.name, held.payload, held.chain_index) == ("next", b"2", 1)


@case(guarantees=(1, 11, 25), needs=(DURABLE, DEPENDENCIES))
async def a_link_that_waits_is_there_when_reopened(harness: Harness, storage: Storage) -> None:
    """A chain that went on after others waits for them in whatever client opens the queue afterwards."""
    await enqueue(storage, job("chain"), job("part"))
    held, part = await claim(storage, 2)
    then = replace(job("chain", name="next", payload=b"2", chain_index=1), after=("part",))
    await apply(storage, Continued(claim=held, then=then))
    await harness.shut(storage)
    storage = await harness.open(storage.queue)
    assert await claim(storage) == []
    await apply(storage, completed(part))
    held = await claim_one(storage)
    assert (held.name, held.payload, held.chain_index) == ("next", b"2", 1)
