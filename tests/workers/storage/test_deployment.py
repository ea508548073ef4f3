"""URLs of clusters and Sentinels: what they say, which are refused, and that nothing secret is shown."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from redis.asyncio import Redis

from tests.deployments import SERVICE, SentinelProcess, ask, sentinel_of
from tests.servers import ValkeyProcess, free_port
from workers import StorageError, StorageUnavailable
from workers.kv.redis import RedisKvStore
from workers.storage import open_storage
from workers.storage.bullmq import BullMQStorage
from workers.storage.redis import RedisStorage
from workers.storage.redis_urls import read_deployment
from workers.storage.urls import SCHEMES
from workers.testing.steps import job


@pytest.mark.parametrize(
    ("url", "nodes", "service", "server_url"),
    [
        ("redis+cluster://a:1,b", (("a", 1), ("b", 6379)), None, "redis://localhost/"),
        ("rediss+cluster://u:p@a/0?x=1", (("a", 6379),), None, "rediss://u:p@localhost/0?x=1"),
        ("redis+sentinel://a,b:2/svc", (("a", 26379), ("b", 2)), "svc", "redis://localhost/"),
        ("rediss+sentinel://:p%40@[::1]:5,[::2]/s%2Fvc/3", (("::1", 5), ("::2", 26379)), "s/vc", None),
    ],
)
def test_what_a_url_says(
    url: str, nodes: tuple[tuple[str, int], ...], service: str | None, server_url: str | None
) -> None:
    """Addresses with the usual ports, the master's name, and the settings of each server as redis-py reads them."""
    found = read_deployment(url)
    assert found is not None
    assert (found.nodes, found.service) == (nodes, service)
    assert found.server_url == (server_url or "rediss://:p%40@localhost/3")
    assert "p%40" not in repr(found)


@pytest.mark.parametrize(
    "url",
    [
        "redis+cluster://",
        "redis+cluster://u:s3cret@a:1,,b:2",
        "redis+cluster://u:s3cret@a:s3cret",
        "redis+cluster://u:s3cret@[::1:7",
        "redis+cluster://u:s3cret@a:1/s3cret",
        "redis+cluster://u:s3cret@\u2100",
        "redis+sentinel://u:s3cret@a:1",
        "redis+sentinel://u:s3cret@a:0/svc",
        "rediss+sentinel://u:s3cret@a:1/svc/s3cret",
    ],
)
def test_a_malformed_url_is_refused(url: str) -> None:
    """The error says what is missing, and quotes nothing."""
    with pytest.raises(StorageError, match=r"not the URL of a (cluster or of Sentinels|Redis server): .+") as caught:
        open_storage(url)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if "+cluster" in scheme or "+sentinel" in scheme])
async def test_a_password_is_shown_by_nobody(scheme: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither by a storage nor by its errors, nor by what they were caused by."""
    place = f"{scheme}://user:s3cret@127.0.0.1:{free_port()}/{'svc/0' if 'sentinel' in scheme else ''}"
    said = []
    try:
        if "bullmq" in scheme:
            storage = BullMQStorage(place, prefix="{bull}")
        else:
            storage = open_storage(f"{place}?sentinel_password=s3cret")
        said.append(repr(storage))
        await storage.connect()
    except (StorageError, StorageUnavailable) as error:
        cause: BaseException | None = error
        while cause is not None:
            said.append(repr(cause))
            cause = cause.__cause__ or cause.__context__
    assert said
    assert "s3cret" not in "".join([*said, caplog.text])


def test_a_queue_is_in_one_slot() -> None:
    """A prefix without braces would spread a queue's keys over a cluster, and Bull's keys never have any."""
    url = "redis+cluster://127.0.0.1:1"
    with pytest.raises(StorageError, match=r"the prefix has to be in braces, as {bull}: keys begin 'bull:mail:'"):
        BullMQStorage(url, "mail")
    with pytest.raises(StorageError, match=r"in braces"):
        BullMQStorage(url, "mail", prefix="{}bull")
    with pytest.raises(StorageError, match=r"in braces"):
        RedisKvStore(url)
    with pytest.raises(StorageError, match="Bull's keys carry no hash tags"):
        open_storage(f"bull+{url}")
    BullMQStorage(url, "mail", prefix="{bull}")
    BullMQStorage(url, "{mail}")
    RedisKvStore(url, prefix="{kv}")
    open_storage(f"bull+redis+sentinel://127.0.0.1:1/{SERVICE}")


@pytest.fixture(scope="module")
def sentinel(valkey_server: ValkeyProcess) -> Iterator[SentinelProcess]:
    """One that has its own users, and says that the run's server is the master."""
    with sentinel_of(valkey_server.port) as sentinel:
        ask(sentinel, "ACL", "SETUSER", "watcher", "on", ">it's & own", "allcommands", "allchannels", "allkeys")
        yield sentinel


@pytest.mark.parametrize("scheme", ["redis+sentinel", "bullmq+redis+sentinel", "bull+redis+sentinel"])
async def test_sentinels_have_credentials_of_their_own(scheme: str, sentinel: SentinelProcess) -> None:
    """They are not those of the servers, and are needed where a Sentinel asks for them."""
    place = f"{scheme}://127.0.0.1:{sentinel.port}/{SERVICE}"
    storage = open_storage(f"{place}?sentinel_username=watcher&sentinel_password=it%27s+%26+own", queue=scheme)
    await storage.connect()
    await storage.enqueue([job("a")])
    assert await storage.status(["a"]) != [None]
    await storage.disconnect()
    with pytest.raises(StorageError, match="refused the log-in"):
        await open_storage(f"{place}?sentinel_username=watcher&sentinel_password=no").connect()
    with pytest.raises(StorageUnavailable, match="nobody knows a master with the name 'other'"):
        await open_storage(place.replace(SERVICE, "other")).connect()


async def test_sentinels_that_are_away_stop_no_queue(redis_url: str, valkey_server: ValkeyProcess) -> None:
    """While nobody can say that the master is elsewhere, it is where it was, for new connections as well."""
    with sentinel_of(valkey_server.port) as sentinel:
        storage = RedisStorage(sentinel.url, "unwatched")
        await storage.connect()
    async with Redis.from_url(redis_url) as admin:
        await admin.client_kill_filter(_type="normal", skipme=True)
    with contextlib.suppress(StorageUnavailable):
        await storage.enqueue([job("a")])
    await storage.enqueue([job("a")])
    assert await storage.status(["a"]) != [None]
    await storage.disconnect()
    with pytest.raises(StorageUnavailable):
        await storage.connect()


async def test_a_server_that_is_no_cluster_says_so(redis_url: str) -> None:
    """Its URL is meant to be `redis://`."""
    with pytest.raises(StorageError, match="cluster support disabled"):
        await open_storage(redis_url.replace("redis:", "redis+cluster:")).connect()
