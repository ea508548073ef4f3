"""What a BullMQ queue says of the library it belongs to, and what Node sees of our workers on it."""

from __future__ import annotations

import asyncio
import logging
import uuid
from base64 import b64encode
from datetime import timedelta
from typing import Any

import pytest

from tests.workers.storage.bullmq.steps import LEASES
from workers.errors import ForeignQueue, StorageError
from workers.jobs import Completed
from workers.storage import open_storage
from workers.storage.bullmq import BullMQStorage
from workers.testing.steps import apply, claim_one, enqueue, job, until


async def connects(url: str, queue: str) -> None:
    storage = BullMQStorage(url, queue)
    await storage.connect()
    await storage.disconnect()


@pytest.mark.parametrize("version", ["bullmq:7.0.0", "bullmq:4.18.2", "bullmq-pro:7.12.0"])
async def test_a_queue_of_an_unknown_version_is_refused(version: str, redis_url: str, client: Any) -> None:
    """By its name and version, when it is opened."""
    queue = f"test-{uuid.uuid4().hex}"
    await client.hset(f"bull:{queue}:meta", "version", version)
    with pytest.raises(StorageError, match=f"'{queue}' belongs to '{version}'"):
        await connects(redis_url, queue)
    await client.hset(f"bull:{queue}:meta", "version", "bullmq:6.7.0")
    await connects(redis_url, queue)


@pytest.mark.parametrize("version", ["bullmq:5.76.10", "bullmq:6.0.0-rc.1", "", "7", "bullmq:next"])
async def test_other_queues_are_opened(version: str, redis_url: str, client: Any) -> None:
    """Those of a known version, and those of which nobody says it: the Python library writes none."""
    queue = f"test-{uuid.uuid4().hex}"
    await client.hset(f"bull:{queue}:meta", "version", version)
    await connects(redis_url, queue)


BULL_4 = {"name": "n", "data": "{}", "opts": '{"attempts":1,"delay":0,"timestamp":1}', "timestamp": "1", "delay": "0"}
BULL_1 = {"data": "{}", "opts": "{}", "timestamp": "1", "attempts": "1", "attemptsMade": "0"}


@pytest.mark.parametrize(
    ("record", "whose"),
    [(BULL_4, "Bull 3 or newer: leave it to them"), (BULL_1, r"Bull 1, whose URL begins with bull\+")],
)
async def test_a_queue_of_bull_is_refused(record: dict[str, str], whose: str, redis_url: str, client: Any) -> None:
    """It has a job as only Bull adds it; where BullMQ has been, nothing is certain, and a warning tells."""
    queue = f"test-{uuid.uuid4().hex}"
    await client.hset(f"bull:{queue}:1", mapping=record)
    await client.zadd(f"bull:{queue}:delayed", {"1": 1})
    with pytest.raises(ForeignQueue, match=whose):
        await connects(redis_url, queue)
    await client.hset(f"bull:{queue}:meta", "version", "bullmq:6.7.0")
    await connects(redis_url, queue)


@pytest.mark.parametrize("key", ["priority", "meta-paused"])
async def test_a_key_that_bull_may_have_written_is_told(
    key: str, redis_url: str, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """BullMQ had it once, too, so that the queue is opened."""
    queue = f"test-{uuid.uuid4().hex}"
    await client.set(f"bull:{queue}:{key}", "1")
    await connects(redis_url, queue)
    [record] = [one for one in caplog.records if "if workers of Bull 3 or newer use it" in one.getMessage()]
    assert f"a key `{key}`" in record.getMessage()


async def end_one(storage: BullMQStorage, client: Any) -> dict[str, str]:
    """The counts of what completed, after one more job has."""
    await enqueue(storage, job(f"job-{uuid.uuid4().hex}"))
    await apply(storage, Completed(claim=await claim_one(storage), result=b"1"))
    if await client.type(f"bull:{storage.queue}:metrics:completed") != "hash":
        return {}
    found: dict[str, str] = await client.hgetall(f"bull:{storage.queue}:metrics:completed")
    return found


async def test_metrics_go_on_where_they_are(
    storage: BullMQStorage, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Without any, nothing is counted; from when a worker of Node counts, we do; keys of another kind stop it."""
    key = f"bull:{storage.queue}:metrics:completed"
    assert await end_one(storage, client) == {}
    await client.hset(key, mapping={"count": "5"})
    await storage.recover(10)
    assert (await end_one(storage, client))["count"] == "6"
    await client.hset(key, mapping={"count": "1e3"})
    await storage.recover(10)
    assert (await end_one(storage, client))["count"] == "1e3"
    await client.delete(key)
    await client.set(key, "text")
    await storage.recover(10)
    assert await end_one(storage, client) == {}
    [told] = caplog.messages
    assert storage.queue in told


async def test_metrics_are_chosen_by_url(redis_url: str, client: Any) -> None:
    """`?metrics=` counts from the first job on; a number out of range is refused."""
    url = f"bullmq+{redis_url}?metrics=1440"
    storage = open_storage(url, queue=f"test-{uuid.uuid4().hex}")
    assert isinstance(storage, BullMQStorage)
    await storage.connect()
    assert (await end_one(storage, client))["count"] == "1"
    await storage.disconnect()
    for bad in ("0", "-1", "many", "99999999"):
        with pytest.raises((ValueError, StorageError), match="metrics"):
            open_storage(f"bullmq+{redis_url}?metrics={bad}", queue="q")


async def names(client: Any, storage: BullMQStorage) -> list[str]:
    """The names of the connections that Node takes for workers of this queue."""
    queue = b64encode(storage.queue.encode()).decode()
    return [name for one in await client.client_list() if (name := one["name"]).startswith(f"bull:{queue}")]


async def test_a_worker_keeps_one_named_connection(storage: BullMQStorage, client: Any) -> None:
    """Waits that follow each other use one connection, which has the worker's name between them, too."""

    async def wait() -> str:
        assert await storage.claim("w 1", leases=LEASES, limit=1) == []
        await storage.wait(("*",), timeout=timedelta(milliseconds=20))
        [name] = await names(client, storage)
        return name

    name = await wait()
    assert name.endswith(":w:w%201")
    assert await wait() == name
    [number] = [one["id"] for one in await client.client_list() if one["name"] == name]
    await client.client_kill_filter(_id=number)  # as a server with a `timeout` does while a worker is busy for long
    assert await wait() == name
    await storage.connect()
    await storage.disconnect()
    await until(lambda: nobody_is_seen(client, storage))


async def nobody_is_seen(client: Any, storage: BullMQStorage) -> bool:
    return await names(client, storage) == []


async def is_blocked(client: Any, user: str) -> bool:
    return any(one["user"] == user and "b" in one["flags"] for one in await client.client_list())


async def test_a_server_may_forbid_names(redis_url: str, client: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Then the worker is woken as any other; it is told once, at debug."""
    caplog.set_level(logging.DEBUG, "workers.storage.bullmq.waiting")
    user = f"user-{uuid.uuid4().hex}"
    await client.execute_command("ACL", "SETUSER", user, "on", "nopass", "~*", "&*", "+@all", "-client|setname")
    storage = BullMQStorage(redis_url.replace("://", f"://{user}:any@"), f"test-{uuid.uuid4().hex}")
    await storage.connect()
    await storage.wait(("*",), timeout=timedelta(milliseconds=20))
    wait = asyncio.create_task(storage.wait(("*",), timeout=timedelta(seconds=60)))
    await until(lambda: is_blocked(client, user))
    await enqueue(storage, job())
    await wait
    await claim_one(storage)
    told = [record.levelname for record in caplog.records if record.name == "workers.storage.bullmq.waiting"]
    assert told == ["DEBUG"]
    await storage.disconnect()
    await client.execute_command("ACL", "DELUSER", user)
