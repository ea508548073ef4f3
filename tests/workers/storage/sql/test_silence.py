"""A PostgreSQL server that says nothing counts as absent, and one that is slow to say all of it does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from functools import partial

import pytest

from tests.relay import Relay
from tests.workers.running import Recorder, outcome
from tests.workers.storage.sql.steps import MINUTE, OFTEN, connected, exchange_ons
from workers.errors import StorageUnavailable
from workers.jobs import JobState
from workers.storage.sql import SqlStorage
from workers.testing import steps
from workers.testing.steps import PATIENCE, job
from workers.worker import Worker, transactions
from workers.worker.events import WorkerEventKind
from workers.worker.handlers import Job

BUSY = timedelta(milliseconds=500)
LARGE = 5_000_000
PACE = 1_000_000
"""By which the large one takes longer than a server may be silent."""


@pytest.fixture
def database() -> str:
    return "postgres"


@pytest.fixture
async def relay(url: str) -> AsyncIterator[Relay]:
    async with Relay(url) as relay:
        yield relay


@pytest.fixture
async def distant(relay: Relay) -> AsyncIterator[SqlStorage]:
    """A storage behind the relay."""
    async with connected(SqlStorage(relay.url, busy_timeout=BUSY)) as storage:
        yield storage


async def test_a_worker_goes_on_and_stops(storage: SqlStorage, relay: Relay) -> None:
    """What is enqueued elsewhere after its connections went silent, it does; while they are, it can be stopped."""
    recorder = Recorder()

    async def handler(_: Job) -> str:
        return "done"

    worker = Worker(SqlStorage(relay.url, busy_timeout=BUSY), {"*": handler}, observers=[recorder])
    running = asyncio.create_task(worker.run())
    async with asyncio.timeout(6 * PATIENCE):
        await recorder.seen(WorkerEventKind.READY)
        await storage.enqueue([job("before")])
        await outcome(storage, "before")
        relay.swallow()
        await storage.enqueue([job("after")])
        while (await storage.status(["after"]))[0].state is not JobState.COMPLETED:  # type: ignore[union-attr]  # there
            await asyncio.sleep(0.1)
        relay.swallow()
        worker.stop()
        await running


@pytest.mark.parametrize("turns", [0, OFTEN], ids=["in a thread", "in the event loop"])
async def test_a_slow_answer_arrives(distant: SqlStorage, relay: Relay, turns: int) -> None:
    """It takes longer than the server may be silent, and is never silent for as long."""
    await exchange_ons(distant, turns)
    await distant.drain()
    payload = bytes(range(250)) * (LARGE // 250)
    await distant.enqueue([job("large", payload=payload)])
    relay.pace = PACE
    async with asyncio.timeout(6 * PATIENCE):
        assert [claim.payload for claim in await steps.claim(distant, 1)] == [payload]


@pytest.mark.parametrize("turns", [0, OFTEN], ids=["in a thread", "in the event loop"])
async def test_an_answer_that_stops_after_half_is_none(distant: SqlStorage, relay: Relay, turns: int) -> None:
    """The claim is unavailable in time, and the job is there when its lease is over."""
    await exchange_ons(distant, turns)
    await distant.drain()
    await distant.enqueue([job("large", payload=bytes(LARGE))])
    relay.stops_at = LARGE // 2
    async with asyncio.timeout(2 * PATIENCE):
        with pytest.raises(StorageUnavailable):
            await distant.claim("w", leases={"*": timedelta(milliseconds=1)}, limit=1)
        relay.stops_at = None
        assert (await distant.recover(10)).requeued


async def test_connections_of_the_same_age_are_not_tried_one_by_one(distant: SqlStorage, relay: Relay) -> None:
    """Once one of them is found to be silent, others are opened in their place."""
    await asyncio.gather(*(distant.status(["a"]) for _ in range(9)), *(distant.cancel("a") for _ in range(9)))
    assert relay.connections >= 4
    relay.swallow()
    failures = 0
    async with asyncio.timeout(3 * PATIENCE):
        for verb in (*(partial(distant.status, ["a"]),) * 4, *(partial(distant.cancel, "a"),) * 4):
            try:
                await verb()
            except StorageUnavailable:
                failures += 1
    assert failures <= 1


async def test_a_commit_without_an_answer_is_unknown(url: str, relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler is told that nobody knows, and the job is not taken for done."""
    monkeypatch.setattr(transactions, "ANSWERED_IN", timedelta(seconds=1))
    told: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    async def handler(job: Job) -> None:
        try:
            async with job.transaction():
                relay.swallow()
        except Exception as error:
            told.set_result(error)
            raise

    async with connected(SqlStorage(relay.url, busy_timeout=BUSY)) as producer:
        await producer.enqueue([job("a")])
        worker = Worker(SqlStorage(relay.url, busy_timeout=BUSY), {"*": handler}, lease=MINUTE)
        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(3 * PATIENCE):
            assert isinstance(await told, StorageUnavailable)
            worker.stop()
            await running
