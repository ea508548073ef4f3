"""Which storage the settings choose for the queues, and where it lies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from federation.base.errors import ConfigurationError
from federation.base.queues.queue import health_check_queue
from federation.base.queues.redis import redis_client
from federation.base.queues.storages import bullmq_url, keyless_redis_url, open_storage
from federation.base.settings.settings import Settings
from federation.runtime.composition import Federation
from tests.deployments import cluster, sentinel_of
from tests.servers import ValkeyProcess
from workers.errors import StorageError
from workers.jobs import Completed, NewJob
from workers.queue import Queue
from workers.storage.base import ANY_NAME
from workers.storage.bull import BullStorage
from workers.storage.bullmq import BullMQStorage
from workers.storage.file import FileStorage
from workers.storage.redis import RedisStorage
from workers.storage.sql import SqlStorage


@pytest.mark.parametrize(
    ("values", "kind", "redis"),
    [
        ({}, SqlStorage, None),
        ({"REDIS_URL": "redis://one:1/0"}, BullMQStorage, "redis://one:1/0"),
        ({"REDIS_URL": "redis://one:1/0", "QUEUE_URL": "sqlite:///queue.db"}, SqlStorage, None),
        (
            {"REDIS_URL": "redis://one:1/0", "QUEUE_URL": "bullmq+redis://two:2/0"},
            BullMQStorage,
            "redis://two:2/0",
        ),
        ({"QUEUE_URL": "bullmq+rediss://two:2"}, BullMQStorage, "rediss://two:2"),
        ({"REDIS_URL": "redis://one:1/0", "QUEUE_URL": "redis://two:2/0"}, RedisStorage, None),
        ({"QUEUE_URL": "rediss://two:2"}, RedisStorage, None),
        ({"REDIS_URL": "redis://one:1/0", "QUEUE_URL": "bull+redis://two:2/0"}, BullStorage, None),
        ({"QUEUE_URL": "bull+rediss://two:2"}, BullStorage, None),
        ({"DATABASE_URL": "postgresql://db/x", "QUEUE_URL": "sqlite:///queue.db"}, SqlStorage, None),
        ({"REDIS_URL": "redis://one:1/0", "QUEUE_URL": "file:///var/queues"}, FileStorage, None),
        ({"DATABASE_URL": "postgresql://db/x", "REDIS_URL": "redis://one:1"}, BullMQStorage, "redis://one:1"),
        ({"DATABASE_URL": "postgres://db/x"}, SqlStorage, None),
        ({"QUEUE_URL": "postgresql://db/x", "REDIS_URL": "redis://one:1"}, SqlStorage, None),
        ({"QUEUE_URL": "redis+cluster://a:1,b:2"}, RedisStorage, None),
        (
            {"QUEUE_URL": "bullmq+rediss+cluster://a:1,b:2", "FEDERATION_QUEUE_PREFIX": "{bull}"},
            BullMQStorage,
            "rediss+cluster://a:1,b:2",
        ),
        ({"REDIS_URL": "redis+sentinel://a,b/svc/1"}, BullMQStorage, "redis+sentinel://a,b/svc/1"),
        ({"QUEUE_URL": "bull+redis+sentinel://a/svc?wait_replicas=1"}, BullStorage, None),
    ],
)
def test_the_queue_storage_is_picked_by_scheme(
    values: dict[str, object], kind: type, redis: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """QUEUE_URL wins, then REDIS_URL, then the application's own database."""
    monkeypatch.chdir(tmp_path)
    settings = Settings.from_values(values)
    storage = open_storage(settings, "some-queue")
    assert isinstance(storage, kind)
    assert storage.queue == "some-queue"
    assert bullmq_url(settings) == redis


def test_a_cluster_needs_a_prefix_in_braces() -> None:
    """The variable is named, and what to write."""
    settings = Settings.from_values({"QUEUE_URL": "bullmq+redis+cluster://a:1"})
    with pytest.raises(ConfigurationError, match=r"FEDERATION_QUEUE_PREFIX: .* in braces, as {bull}"):
        open_storage(settings, "q")


@asynccontextmanager
async def _in_a_cluster(redis: ValkeyProcess) -> AsyncIterator[str]:
    with cluster(masters=2, replicas=0) as servers:
        await servers.ready()
        yield servers.url


@asynccontextmanager
async def _behind_a_sentinel(redis: ValkeyProcess) -> AsyncIterator[str]:
    with sentinel_of(redis.port) as sentinel:
        yield sentinel.url


@pytest.mark.parametrize("place", [_in_a_cluster, _behind_a_sentinel])
async def test_bullmq_where_servers_stand_in_for_each_other(
    place: Callable[[ValkeyProcess], AbstractAsyncContextManager[str]], valkey_server: ValkeyProcess, queue_prefix: str
) -> None:
    """The stock package shares the queue, tasks' keys lie beside it, and rate limits are in a Redis if there is one."""
    async with place(valkey_server) as url:
        values = {"QUEUE_URL": f"bullmq+{url}", "FEDERATION_QUEUE_PREFIX": f"{{{queue_prefix}}}"}
        federation = Federation(Settings.from_values(values))
        queue = health_check_queue(federation.settings, federation.worker_storage("q"))
        await queue.start()
        added = await queue.raw.add("n", {"a": 1}, {})
        assert (await queue.get_status(added.id)) is not None
        assert federation.task_keys is not None
        assert await (await federation.task_keys.store()).set_if_absent(("a",), b"1", ttl=timedelta(seconds=30)) is None
        assert await (await federation.task_keys.store()).get(("a",)) == b"1"
        assert (federation.redis is None) == ("cluster" in url)
        await queue.stop()
        await federation.close()


@pytest.mark.parametrize(
    ("values", "redis"),
    [
        ({}, None),
        ({"REDIS_URL": "redis://one:1/0"}, "redis://one:1/0"),
        ({"REDIS_URL": "redis://one:1/0", "QUEUE_URL": "redis://two:2/0"}, None),
        ({"REDIS_URL": "redis://one:1/0", "QUEUE_URL": "bull+redis://two:2/0"}, "redis://two:2/0"),
        ({"QUEUE_URL": "bull+redis://two:2/0?dialect=C"}, "redis://two:2/0"),
        ({"QUEUE_URL": "bullmq+rediss://two:2"}, "rediss://two:2"),
        ({"QUEUE_URL": "bullmq+redis://two:2/0?max_foreign_stalls=3"}, "redis://two:2/0"),
    ],
    ids=["sqlite", "bullmq", "redis", "bull", "bull-dialect", "bullmq-tls", "bullmq-stalls"],
)
def test_marks_lie_beside_queues_that_keep_no_keys(values: dict[str, object], redis: str | None) -> None:
    """BullMQ's and Bull's Redis is where tasks are marked, whatever else there is."""
    assert keyless_redis_url(Settings.from_values(values)) == redis


async def test_queues_on_redis_are_apart_by_their_prefix(redis_url: str, queue_prefix: str) -> None:
    """Two nodes on one Redis do not get each other's jobs."""
    mine, theirs = (
        open_storage(Settings.from_values({"QUEUE_URL": redis_url, "FEDERATION_QUEUE_PREFIX": prefix}), "q")
        for prefix in (queue_prefix, f"{queue_prefix}-2")
    )
    for storage in (mine, theirs):
        await storage.connect()
    await mine.enqueue([NewJob(id="a", name="n", payload=b"")])
    leases = {ANY_NAME: timedelta(seconds=30)}
    assert await theirs.claim("w", leases=leases, limit=1) == []
    assert len(await mine.claim("w", leases=leases, limit=1)) == 1
    for storage in (mine, theirs):
        await storage.disconnect()


def test_a_queue_url_names_the_file_of_the_queue(tmp_path: Path) -> None:
    """Not the application's database."""
    settings = Settings.from_values(
        {"DATABASE_URL": f"sqlite:///{tmp_path}/app.db", "QUEUE_URL": f"sqlite:///{tmp_path}/queue.db"}
    )
    assert f"{tmp_path}/queue.db" in repr(open_storage(settings, "q"))


def test_a_queue_url_names_the_directory_of_the_queue(tmp_path: Path) -> None:
    """Its escapes are those of URLs."""
    settings = Settings.from_values({"QUEUE_URL": "file:///var/my%20queues"})
    assert repr(open_storage(settings, "q")) == "FileStorage('/var/my queues', queue='q')"


async def test_metrics_are_chosen_in_the_url(redis_url: str, queue_prefix: str) -> None:
    """They are the storage's; the clients that share its URL do not see them; anything but a number is refused."""
    values = {"REDIS_URL": f"{redis_url}?metrics=60", "FEDERATION_QUEUE_PREFIX": queue_prefix}
    settings = Settings.from_values(values)
    assert bullmq_url(settings) == redis_url
    storage, client = open_storage(settings, "some-queue"), redis_client(settings)
    assert client is not None
    async with Queue(storage) as queue:
        await queue.enqueue(None, id="job")
        [held] = await storage.claim("w", leases={ANY_NAME: timedelta(seconds=30)}, limit=1)
        await storage.settle([Completed(claim=held, result=b"1")])
    assert await client.hget(f"{queue_prefix}:some-queue:metrics:completed", "count") == "1"
    await client.aclose()
    elsewhere = redis_client(Settings.from_values({**values, "QUEUE_URL": "file:///var/queues"}))
    assert elsewhere is not None
    assert await elsewhere.ping()
    await elsewhere.aclose()
    with pytest.raises(StorageError, match="metrics"):
        open_storage(Settings.from_values({"QUEUE_URL": f"bullmq+{redis_url}?metrics=many"}), "some-queue")
