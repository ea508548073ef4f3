"""The delivery queue in memory, and queues on BullMQ."""

from __future__ import annotations

from datetime import timedelta

import pytest

from federation.base.queues.job_data import FederationDeliveryJob
from federation.base.queues.queue import DELIVERY_QUEUE_NAME, JobQueue, delivery_queue
from federation.base.queues.storages import open_storage
from federation.base.settings.settings import Settings
from workers.jobs import Claim
from workers.storage.base import ANY_NAME
from workers.storage.bullmq import BullMQStorage
from workers.storage.memory import MemoryStorage

DATA = FederationDeliveryJob(
    delivery_job_id="d-1",
    target_url="https://b.example/api/auth/social/follows",
    server_url="https://b.example",
    payload='{"method":"FEDERATE"}',
)


@pytest.fixture
def queue() -> JobQueue:
    """The delivery queue, in memory."""
    return delivery_queue(Settings.from_values({}), MemoryStorage(queue=DELIVERY_QUEUE_NAME))


async def claimed(queue: JobQueue) -> Claim:
    """The one job, as a worker gets it."""
    (claim,) = await queue.storage.claim("w", leases={ANY_NAME: timedelta(seconds=30)}, limit=10)
    return claim


def opened(redis_url: str, prefix: str, name: str) -> tuple[Settings, BullMQStorage]:
    """Settings that put the queues on BullMQ, and the storage of one of them."""
    settings = Settings.from_values({"REDIS_URL": redis_url, "FEDERATION_QUEUE_PREFIX": prefix})
    storage = open_storage(settings, name)
    assert isinstance(storage, BullMQStorage)
    return settings, storage
