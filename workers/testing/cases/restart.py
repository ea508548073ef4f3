"""What happens when the server behind a storage goes away and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from workers.errors import StorageUnavailable
from workers.jobs import JobEventKind, JobState
from workers.testing.case import RESTARTS, case
from workers.testing.harness import Harness
from workers.testing.steps import (
    HOUR,
    PATIENCE,
    apply,
    background,
    claim_one,
    completed,
    enqueue,
    job,
    next_claim,
    state,
)

T = TypeVar("T")


async def _in_time(call: Callable[[], Awaitable[T]]) -> T:
    """What the call answers when it is repeated as a worker repeats it: on `StorageUnavailable`, for a while."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return await call()
            except StorageUnavailable:
                await asyncio.sleep(0.05)


@case(guarantees=(1, 11), needs=(RESTARTS,))
async def every_verb_works_after_a_restart(harness: Harness) -> None:
    """After a restart the same clients go on: jobs, claims and delays are as they were."""
    storage = await harness.open()
    await enqueue(storage, job("held"), job("queued"), job("scheduled", delay=HOUR))
    held = await claim_one(storage)
    await harness.restart_server()
    assert await _in_time(lambda: state(storage, "queued")) is JobState.QUEUED
    assert await _in_time(lambda: state(storage, "scheduled")) is JobState.SCHEDULED
    assert (await _in_time(lambda: storage.renew([held]))).lost == {}
    await _in_time(lambda: apply(storage, completed(held, b"1")))
    assert (await _in_time(lambda: claim_one(storage))).job_id == "queued"


@case(guarantees=(11,), needs=(RESTARTS,))
async def a_wait_survives_a_restart(harness: Harness) -> None:
    """A worker asleep during a restart gets the next job, without being started again."""
    storage = await harness.open()
    producer = await harness.open(storage.queue)
    worker = asyncio.create_task(_in_time(lambda: next_claim(storage)))
    async with background(worker):
        await asyncio.sleep(0.03)
        await harness.restart_server()
        await _in_time(lambda: producer.enqueue([job("after")]))
        assert (await worker).job_id == "after"


@case(guarantees=(11,), needs=(RESTARTS,))
async def a_subscription_survives_a_restart(harness: Harness) -> None:
    """A subscriber from before the restart hears of what happens after it, without subscribing again."""
    storage = await harness.open()
    async with storage.events() as subscription:
        await harness.restart_server()
        heard = asyncio.create_task(subscription.get())
        async with background(heard), asyncio.timeout(PATIENCE):
            while not heard.done():
                await _in_time(lambda: storage.enqueue([job()]))
                await asyncio.wait([heard], timeout=0.1)
            assert (await heard).kind is JobEventKind.QUEUED


@case(guarantees=(7, 11), needs=(RESTARTS,))
async def cancel_requests_are_heard_after_a_restart(harness: Harness) -> None:
    """A worker that listened before the restart hears of the cancel requests made after it."""
    storage = await harness.open()
    await enqueue(storage, job("running"))
    await claim_one(storage)
    async with storage.cancel_requests() as requests:
        await harness.restart_server()
        heard = asyncio.create_task(requests.get())
        async with background(heard), asyncio.timeout(PATIENCE):
            while not heard.done():
                await _in_time(lambda: storage.cancel("running"))
                await asyncio.wait([heard], timeout=0.1)
            assert (await heard).job_id == "running"
