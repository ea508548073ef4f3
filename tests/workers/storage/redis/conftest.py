"""A queue of the Redis storage on the run's server, and a client beside it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from workers.storage.redis import RedisStorage


@pytest.fixture
async def storage(redis_url: str) -> AsyncIterator[RedisStorage]:
    storage = RedisStorage(redis_url, f"test-{uuid.uuid4().hex}")
    await storage.connect()
    yield storage
    await storage.disconnect()


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Any]:
    """A client of the run's server that reads bytes."""
    async with Redis.from_url(redis_url) as client:
        yield client
