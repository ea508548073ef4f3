"""What the storages on Redis promise beyond the contract, each of them."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import TypeAlias

import pytest

from tests.servers import free_port
from workers import JobEventKind, JobState, StorageError, StorageUnavailable
from workers.jobs import Completed, Released, SettleStatus
from workers.storage import rules
from workers.storage.bull import BullStorage
from workers.storage.bullmq import BullMQStorage
from workers.storage.redis import RedisStorage
from workers.testing.steps import PATIENCE, job

LEASES = {"*": timedelta(seconds=30)}

OnRedis: TypeAlias = BullStorage | BullMQStorage | RedisStorage


@pytest.fixture(params=[BullStorage, BullMQStorage, RedisStorage])
def kind(request: pytest.FixtureRequest) -> type[OnRedis]:
    found: type[OnRedis] = request.param
    return found


@pytest.fixture
async def storage(kind: type[OnRedis], redis_url: str) -> AsyncIterator[OnRedis]:
    storage = kind(redis_url, f"test-{uuid.uuid4().hex}")
    await storage.connect()
    yield storage
    await storage.disconnect()


async def test_a_hanging_server_is_unavailable_in_time(kind: type[OnRedis]) -> None:
    """A server that takes connections and never answers is given up after the storage's timeout."""

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    storage = kind(f"redis://127.0.0.1:{port}", "mail", timeout=timedelta(milliseconds=200))
    async with server, asyncio.timeout(PATIENCE):
        with pytest.raises(StorageUnavailable):
            await storage.connect()
        server.close()


@pytest.mark.parametrize(
    "setting", ["protocol=3", "decode_responses=true", "decode_responses=false", "encoding=latin-1"]
)
async def test_a_url_does_not_change_the_shape_of_replies(kind: type[OnRedis], redis_url: str, setting: str) -> None:
    """As one does that an application has for its own client: jobs are claimed and read, and events heard."""
    storage = kind(f"{redis_url}?{setting}", f"test-{uuid.uuid4().hex}")
    await storage.connect()
    try:
        async with storage.subscribe("größe-1") as events:
            await storage.enqueue([job("größe-1", payload="größe".encode())])
            [claim] = await storage.claim("worker", leases=LEASES, limit=1)
            assert (claim.job_id, claim.payload) == ("größe-1", "größe".encode())
            await storage.settle([Completed(claim=claim, result=b"1")])
            async with asyncio.timeout(PATIENCE):
                while (await events.get()).kind is not JobEventKind.COMPLETED:
                    pass
    finally:
        await storage.disconnect()


async def test_no_server_at_all(kind: type[OnRedis]) -> None:
    """A port nobody listens on is unavailable, not a bug."""
    with pytest.raises(StorageUnavailable):
        await kind(f"redis://127.0.0.1:{free_port()}", "mail").connect()


async def test_a_cancelled_claim_gives_its_jobs_back(storage: OnRedis) -> None:
    """Whenever a claim is cancelled, its jobs are claimable at once, and their attempt is not counted."""
    await storage.enqueue([job(f"job-{number}") for number in range(10)])
    for turn in range(30):
        claiming = asyncio.create_task(storage.claim("w", leases=LEASES, limit=10))
        await asyncio.sleep(0.0002 * (turn % 12))
        if claiming.cancel():
            with pytest.raises(asyncio.CancelledError):
                await claiming
        else:
            await storage.settle([Released(claim=claim) for claim in claiming.result()])
        assert (await storage.counts())[JobState.QUEUED] == 10
    claims = await storage.claim("w", leases=LEASES, limit=10)
    assert [(claim.job_id, claim.attempt) for claim in claims] == [(f"job-{number}", 1) for number in range(10)]


async def test_what_no_server_takes_is_an_error(storage: OnRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    """A payload or result beyond what Redis takes in one string is no outage; neighbours are settled."""
    monkeypatch.setattr(rules, "REDIS_VALUE_BYTES", 10)
    with pytest.raises(StorageError, match="job 'large': 11 bytes are more"):
        await storage.enqueue([job("small"), job("large", payload=bytes(11))])
    assert await storage.status(["small"]) == [None]
    await storage.enqueue([job("a"), job("b")])
    one, other = await storage.claim("w", leases=LEASES, limit=2)
    outcomes = await storage.settle([Completed(claim=one, result=bytes(11)), Completed(claim=other, result=b"")])
    assert [outcome.status for outcome in outcomes] == [SettleStatus.ERROR, SettleStatus.APPLIED]
    assert (await storage.settle([Completed(claim=one, result=b"1")]))[0].status is SettleStatus.APPLIED
