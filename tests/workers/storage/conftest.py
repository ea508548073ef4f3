"""A client beside the storages on Redis, and a server that a test may stop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.servers import ValkeyProcess, valkey


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Any]:
    """A client of the run's server that reads text."""
    async with Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


@pytest.fixture
def own_server() -> Iterator[ValkeyProcess]:
    """A server that the test may stop."""
    with valkey() as server:
        yield server
