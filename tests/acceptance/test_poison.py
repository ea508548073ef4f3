"""What somebody else writes into a queue's Redis, against whole nodes: nobody's process ends for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import bullmq
import httpx
import pytest
from redis.asyncio import Redis

from federation.protocol.keys import generate_own_keys
from tests.acceptance.node_process import NodeProcess
from tests.patience import until
from workers import JobFailedError, Queue
from workers.jobs import RepairOutcome
from workers.storage.bull import BullStorage
from workers.storage.redis import RedisStorage

QUEUE = "federation-delivery"


@pytest.fixture
def node(tmp_path: Path, migrated_file: Path, redis_url: str, queue_prefix: str) -> Iterator[NodeProcess]:
    settings = {"REDIS_URL": redis_url, "FEDERATION_QUEUE_PREFIX": queue_prefix, "FEDERATION_LEASE": "1s"}
    node = NodeProcess("a", generate_own_keys(), tmp_path / "a", f"sqlite:///{migrated_file}", settings)
    yield node
    node.kill()


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Any]:
    async with Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


async def served(node: NodeProcess) -> bool:
    async with httpx.AsyncClient() as http:
        answer = await http.get(f"http://127.0.0.1:{node.port}/healthz")
        return answer.status_code == 200


async def works(client: Any, prefix: str, job_id: str) -> None:
    """A job of another producer that is no delivery is taken and fails, as it should."""
    queue = bullmq.Queue(QUEUE, {"connection": client, "prefix": prefix})
    await queue.add("deliver-post", {"of": "theirs"}, {"jobId": job_id})

    async def has_ended() -> bool:
        return await client.zscore(f"{prefix}:{QUEUE}:failed", job_id) is not None

    await until(has_ended)


@pytest.mark.parametrize("job_id", ["completed", "failed", "delayed", "prioritized", "stalled", "marker"])
async def test_a_job_named_as_a_key_ends_no_process(
    node: NodeProcess, client: Any, queue_prefix: str, job_id: str
) -> None:
    """It is told of once, however often the node is started; other jobs run, and requests are answered."""
    queue = bullmq.Queue(QUEUE, {"connection": client, "prefix": queue_prefix})
    try:
        await queue.add("deliver-post", {"of": "theirs"}, {"jobId": job_id})
    except Exception as error:
        assert "WRONGTYPE" in str(error)  # noqa: PT017 - most keys do not answer so
    await node.start()
    await until(lambda: node.events("job_set_aside"))
    await works(client, queue_prefix, "theirs-1")
    assert await served(node)
    assert node.stop() == 0
    await node.start()
    await works(client, queue_prefix, "theirs-2")
    assert await served(node)
    assert node.stop() == 0
    [line] = node.events("job_set_aside")
    assert line["job_ids"] == [job_id]


async def test_keys_in_the_way_leave_the_inbound_side_serving(
    node: NodeProcess, client: Any, queue_prefix: str
) -> None:
    """They are named, and what waits is done once they are gone."""
    key = f"{queue_prefix}:{QUEUE}:wait"
    await client.set(key, "no queue's")
    await node.start()
    await until(lambda: len([line for line in node.events("worker_error") if key in str(line["error"])]) > 1)
    assert await served(node)
    await client.delete(key)
    await works(client, queue_prefix, "theirs")
    assert node.stop() == 0


LAYOUTS = {"": RedisStorage, "bull+": BullStorage}


@pytest.mark.parametrize("scheme", LAYOUTS)
async def test_other_layouts_leave_it_serving_as_well(
    tmp_path: Path, migrated_file: Path, redis_url: str, queue_prefix: str, client: Any, scheme: str
) -> None:
    """The key is named, and when it has been set aside what waits is done."""
    settings = {"QUEUE_URL": scheme + redis_url, "FEDERATION_QUEUE_PREFIX": queue_prefix, "FEDERATION_LEASE": "1s"}
    node = NodeProcess("a", generate_own_keys(), tmp_path / "a", f"sqlite:///{migrated_file}", settings)
    key = f"{queue_prefix}:{QUEUE}:wait" if scheme else f"{{{queue_prefix}:{QUEUE}}}:ready"
    await client.set(key, "no queue's")
    queue = Queue(LAYOUTS[scheme](redis_url, QUEUE, prefix=queue_prefix))
    try:
        await node.start()
        await until(lambda: [line for line in node.events("worker_error") if key in str(line["error"])])
        assert await served(node)
        assert [one.outcome for one in await queue.manage.repair()] == [RepairOutcome.MOVED]
        with pytest.raises(JobFailedError):  # it is no delivery
            await queue.enqueue_and_wait({"of": "theirs"}, name="deliver-post")
        assert node.stop() == 0
    finally:
        node.kill()
        await queue.stop()
