"""A Bull queue on the run's server, and who works on it beside us."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from redis.asyncio import Redis

from tests.workers.storage.bull.steps import NodeBull
from workers.storage.bull import BullStorage

GRACE = timedelta(seconds=1)
"""In which a test gets to lock a job, however slow the machine is."""


@pytest.fixture
async def storage(redis_url: str) -> AsyncIterator[BullStorage]:
    storage = BullStorage(f"bull+{redis_url}", f"test-{uuid.uuid4().hex}", grace=GRACE)
    await storage.connect()
    yield storage
    await storage.disconnect()


@pytest.fixture
async def old(redis_url: str, storage: BullStorage) -> AsyncIterator[BullStorage]:
    """The same queue, with Node of dialect A beside it."""
    old = BullStorage(redis_url, storage.queue, dialect="A", grace=GRACE)
    await old.connect()
    yield old
    await old.disconnect()


@pytest.fixture
def node(client: Redis, storage: BullStorage) -> NodeBull:
    return NodeBull(client, storage)
