"""A BullMQ queue on the run's server."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest

from workers.storage.bullmq import BullMQStorage


@pytest.fixture
async def storage(redis_url: str) -> AsyncIterator[BullMQStorage]:
    storage = BullMQStorage(redis_url, f"test-{uuid.uuid4().hex}")
    await storage.connect()
    yield storage
    await storage.disconnect()
