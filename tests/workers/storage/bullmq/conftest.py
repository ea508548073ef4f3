"""A BullMQ queue on the run's server, and a server of one's own."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.servers import ValkeyProcess, valkey
from workers.storage.bullmq import BullMQStorage


@pytest.fixture
async def storage(redis_url: str) -> AsyncIterator[BullMQStorage]:
    storage = BullMQStorage(redis_url, f"test-{uuid.uuid4().hex}")
    await storage.connect()
    yield storage
    await storage.disconnect()


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Any]:
    async with Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


@pytest.fixture
def own_server() -> Iterator[ValkeyProcess]:
    """A server that the test may stop."""
    with valkey() as server:
        yield server
