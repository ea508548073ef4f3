"""A request to cancel a running job reaches its handler at once, whatever it meets: no renewal is due in any test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Final, cast

import pytest

from tests.workers.harnesses import HARNESSES
from tests.workers.running import Recorder, forever, outcome, running
from workers.errors import StorageUnavailable
from workers.jobs import CancelResult, Claim, JobEvent, JobEventKind, OutcomeKind
from workers.storage.base import Storage, Subscription
from workers.storage.memory import MemoryStorage
from workers.storage.on_redis import subscribers as redis_listener
from workers.storage.sql.postgres.driver import listener as sql_postgres_listener
from workers.storage.subscribers import BUFFER
from workers.testing import Harness, MemoryHarness, all_cases, steps
from workers.testing.faults import faulty
from workers.testing.stand_in import StandIn
from workers.testing.steps import PATIENCE
from workers.worker import Worker
from workers.worker.cancels import MOST_REMEMBERED
from workers.worker.events import WorkerEventKind as Kind

ORDINARY: Final = next(case for case in all_cases() if not case.needs)


class Slow(StandIn):
    """A storage whose answers to claims, and whose cancel requests, arrive when the test lets them."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.may_answer = asyncio.Event()
        self.may_listen = asyncio.Event()
        self.claimed = asyncio.Event()
        self.listening = asyncio.Event()
        self.heard = asyncio.Event()

    async def claim(self, worker_id: str, *, leases: Mapping[str, timedelta], limit: int) -> list[Claim]:
        claims = await self._storage.claim(worker_id, leases=leases, limit=limit)
        if claims:
            self.claimed.set()
            await self.may_answer.wait()
        return claims

    @asynccontextmanager
    async def cancel_requests(self) -> AsyncIterator[Subscription]:
        await self.may_listen.wait()
        async with self._storage.cancel_requests() as requests:
            self.listening.set()
            yield Overheard(requests, self.heard)


class Overheard:
    """A subscription that tells when it told something."""

    def __init__(self, requests: Subscription, heard: asyncio.Event) -> None:
        self._requests = requests
        self._heard = heard

    async def get(self) -> JobEvent:
        event = await self._requests.get()
        self._heard.set()
        return event


@asynccontextmanager
async def slowly_served(harness: Harness) -> AsyncIterator[tuple[Storage, Slow, Recorder]]:
    """A client of a queue that a worker on a slow storage serves."""
    storage = await harness.open()
    slow, recorder = Slow(await harness.open(storage.queue)), Recorder()
    async with running(worker_on(cast("Storage", slow), recorder)):
        try:
            yield storage, slow, recorder
        finally:
            slow.may_answer.set()
            slow.may_listen.set()


def worker_on(storage: Storage, recorder: Recorder) -> Worker:
    """A worker for one job at a time: while it has that, it asks the storage for nothing."""
    return Worker(storage, {"work": forever}, concurrency=1, lease=steps.LEASE, observers=[recorder])


async def happened(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), PATIENCE)


async def cancel_running(storage: Storage) -> None:
    assert await storage.cancel("job") is CancelResult.PROCESSING


async def assert_cancelled(storage: Storage) -> None:
    """The job ended as a cancelled one does."""
    assert (await outcome(storage, "job")).kind is OutcomeKind.CANCELLED


async def test_a_request_made_before_the_worker_listens(harness: Harness) -> None:
    """A worker that had a job before it could hear of requests looks at its jobs once it can."""
    async with slowly_served(harness) as (storage, slow, recorder):
        slow.may_answer.set()
        await steps.enqueue(storage, steps.job("job"))
        await recorder.seen(Kind.ACTIVE)
        async with storage.cancel_requests() as requests:
            await cancel_running(storage)
            await steps.expect(requests, JobEventKind.CANCEL_REQUESTED)  # told, and to nobody else
        slow.may_listen.set()
        await assert_cancelled(storage)
    assert recorder.of(Kind.ERROR) == []


async def test_a_request_heard_before_the_answer_to_the_claim(harness: Harness) -> None:
    """What is heard of a job the worker does not know it has is remembered until it knows."""
    async with slowly_served(harness) as (storage, slow, _):
        slow.may_listen.set()
        await happened(slow.listening)
        await steps.enqueue(storage, steps.job("job"))
        await happened(slow.claimed)
        await cancel_running(storage)
        await happened(slow.heard)
        slow.may_answer.set()
        await assert_cancelled(storage)


async def test_a_request_made_before_both(harness: Harness) -> None:
    """A worker that begins to listen while a claim is under way looks at what that brings."""
    async with slowly_served(harness) as (storage, slow, _):
        await steps.enqueue(storage, steps.job("job"))
        await happened(slow.claimed)
        await cancel_running(storage)
        slow.may_listen.set()
        await happened(slow.listening)
        slow.may_answer.set()
        await assert_cancelled(storage)


async def test_a_request_heard_during_an_outage() -> None:
    """A worker that could not ask whether the request is for its attempt asks again."""
    memory, recorder = MemoryStorage(), Recorder()
    storage, faults = faulty(memory)
    await steps.enqueue(memory, steps.job("job"))
    async with running(worker_on(storage, recorder)):
        await recorder.seen(Kind.ACTIVE)
        faults.requests_lost["renew"] = 2
        await cancel_running(memory)
        await assert_cancelled(memory)
    assert [type(event.error) for event in recorder.of(Kind.ERROR)] == [StorageUnavailable] * 2


async def test_a_request_heard_before_many_others() -> None:
    """However many requests are heard before the answer to the claim, the one for its job is not forgotten."""
    async with MemoryHarness() as harness, slowly_served(harness) as (storage, slow, _):
        others = await jobs_elsewhere(storage, MOST_REMEMBERED)
        slow.may_listen.set()
        await happened(slow.listening)
        await steps.enqueue(storage, steps.job("job"))
        await happened(slow.claimed)
        await cancel_running(storage)
        await happened(slow.heard)
        assert await storage.remove(others, running=True) == len(others)
        slow.may_answer.set()
        await assert_cancelled(storage)


@pytest.mark.parametrize("others", [BUFFER - 1, BUFFER])
async def test_a_request_among_too_many(others: int) -> None:
    """However many jobs of others are ended in one step, the worker hears of its own."""
    storage, recorder = MemoryStorage(), Recorder()
    ids = await jobs_elsewhere(storage, others)
    await steps.enqueue(storage, steps.job("job"))
    async with running(worker_on(storage, recorder)):
        await recorder.seen(Kind.ACTIVE)
        assert await storage.remove(["job", *ids], running=True) == others + 1
        await recorder.seen(Kind.LEASE_LOST)
    assert len(recorder.of(Kind.ERROR)) == (others == BUFFER)


async def jobs_elsewhere(storage: Storage, count: int) -> list[str]:
    """The ids of jobs that another worker runs."""
    ids = [str(number) for number in range(count)]
    await steps.enqueue(storage, *(steps.job(job_id, name="elsewhere") for job_id in ids))
    claims = await storage.claim("other", leases={"elsewhere": steps.LEASE}, limit=count)
    assert len(claims) == count
    return ids


@pytest.mark.parametrize("name", [name for name in HARNESSES if name in ("postgres", "redis", "bullmq", "bull")])
async def test_a_request_made_while_the_connection_is_lost(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose connection to hear by was cut looks at its jobs when it has another."""
    monkeypatch.setattr(sql_postgres_listener, "FIRST_PAUSE_SECONDS", 1.0)  # by then the request has been made
    monkeypatch.setattr(redis_listener, "FIRST_PAUSE_SECONDS", 1.0)
    async with HARNESSES[name](ORDINARY, request) as harness:
        storage = await harness.open()
        slow, recorder = Slow(await harness.open(storage.queue)), Recorder()
        slow.may_answer.set()
        slow.may_listen.set()
        await steps.enqueue(storage, steps.job("job"))
        async with running(worker_on(cast("Storage", slow), recorder)):
            await happened(slow.listening)
            await recorder.seen(Kind.ACTIVE)
            await harness.cut_connections()
            async with asyncio.timeout(PATIENCE):
                while True:
                    try:
                        await cancel_running(storage)
                        break
                    except StorageUnavailable:
                        await asyncio.sleep(0)
            await assert_cancelled(storage)
