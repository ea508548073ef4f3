"""What the BullMQ storage is, what it may be pointed at, and what it says of what it may not."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.servers import ValkeyProcess
from tests.workers.storage.bullmq.steps import LEASES
from workers import StorageError
from workers.storage.base import Storage
from workers.storage.bullmq import BullMQStorage
from workers.testing.steps import claim_one, job


def test_it_is_a_storage(redis_url: str) -> None:
    """The type checker and `limits` agree on what this is."""
    storage: Storage = BullMQStorage(redis_url, "q")
    assert storage.queue == "q"
    assert (storage.capabilities.clock, storage.capabilities.recovery_passes) == ("client", 2)


async def test_a_client_without_text_replies_is_refused(redis_url: str) -> None:
    """BullMQ's scripts answer text; the error says which setting is wrong."""
    async with Redis.from_url(redis_url) as bytes_client:
        with pytest.raises(StorageError, match="decode_responses=True"):
            BullMQStorage(bytes_client)


@pytest.mark.parametrize("target", ["http://example.org", "", "sqlite:///x", 7])
def test_other_targets_are_refused(target: Any) -> None:
    """What is no Redis is refused before anything is asked of it."""
    with pytest.raises(StorageError):
        BullMQStorage(target)


async def test_a_lent_client_stays_open(redis_url: str, client: Any) -> None:
    """The storage uses the client's settings and never its connections."""
    storage = BullMQStorage(client, f"test-{uuid.uuid4().hex}")
    await storage.connect()
    await client.client_setname("lent")
    await storage.enqueue([job("a")])
    await storage.disconnect()
    assert await client.client_getname() == "lent"


async def test_both_forms_of_url(own_server: ValkeyProcess) -> None:
    """`bullmq+redis://` is the same server, and `?queue=` names the queue unless the argument does."""
    storage = BullMQStorage(f"bullmq+{own_server.url}?queue=named")
    assert storage.queue == "named"
    await storage.connect()
    await storage.enqueue([job("a")])
    await storage.disconnect()
    same = BullMQStorage(own_server.url, "named")
    await same.connect()
    assert (await claim_one(same)).job_id == "a"
    await same.disconnect()
    assert BullMQStorage(f"{own_server.url}?queue=named", "other").queue == "other"


async def test_a_password_is_never_shown(own_server: ValkeyProcess) -> None:
    """Neither the repr nor the error of a refused log-in has the URL's password."""
    storage = BullMQStorage(own_server.url.replace("//", "//user:hunter2@"))
    assert "hunter2" not in repr(storage)
    with pytest.raises(StorageError, match="refused the log-in") as caught:
        await storage.connect()
    assert "hunter2" not in str(caught.value)


async def test_verbs_need_a_connection(redis_url: str) -> None:
    """A verb before `connect` says what is missing."""
    with pytest.raises(StorageError, match="connect"):
        await BullMQStorage(redis_url).counts()


async def test_foreign_keys_are_reported(storage: BullMQStorage, client: Any) -> None:
    """Keys of another type in the queue's place are an error that retrying will not cure, and that names them."""
    await client.set(f"bull:{storage.queue}:wait", "x")
    with pytest.raises(StorageError, match=f"bull:{storage.queue}:wait is a string, not a list"):
        await storage.claim("w", leases=LEASES, limit=1)
    with pytest.raises(StorageError):
        await storage.enqueue([job("a")])
