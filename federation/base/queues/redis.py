"""A Redis client as the processes of a node use it, and what is kept in that Redis beside its queues."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from federation.base.queues.storages import keyless_redis_url
from federation.base.settings.settings import Settings
from federation.base.settings.types import plain
from workers.storage.redis_urls import read_deployment, take_parameter

if TYPE_CHECKING:
    from redis.asyncio import Redis, RedisCluster

    from workers.kv.redis import RedisKvStore

REDIS_TIMEOUT: Final = timedelta(seconds=5)
BLOCKING_TIMEOUT: Final = timedelta(seconds=15)
"""For clients that a stock `bullmq.Worker` may be given. Idle, it blocks for 5 s, and up to 10 s for a delayed job.

A read that is given up meanwhile costs it seconds until its next look.
"""


def redis_client(settings: Settings, timeout: timedelta = REDIS_TIMEOUT) -> Redis | None:
    """Make a new client for the Redis of the queues, or for the one that is set beside them; None without a Redis.

    An answer that takes longer than `timeout` is given up. A cluster is for queues alone, so beside queues on one there
    may be none.
    """
    urls = (keyless_redis_url(settings), plain(settings.redis_url))
    url = next((url for url in urls if url is not None and not _is_cluster(url)), None)
    return None if url is None else _client(_without_options(url), timeout)


def bullmq_connection(url: str) -> str | Redis | RedisCluster:
    """Return what the stock `bullmq` package takes as a connection to the Redis at this URL."""
    url = _without_options(url)
    deployment = read_deployment(url)
    if deployment is None:
        return url
    if not deployment.is_cluster:
        return _client(url)
    from redis.asyncio.cluster import ClusterNode, RedisCluster
    from redis.asyncio.connection import parse_url

    settings: dict[str, Any] = {**parse_url(deployment.server_url), "decode_responses": True}
    settings["ssl"] = settings.pop("connection_class", None) is not None
    settings["host"], settings["port"] = deployment.nodes[0]
    others = [ClusterNode(host, port) for host, port in deployment.nodes[1:]]
    return RedisCluster(startup_nodes=others, **settings)


def _is_cluster(url: str) -> bool:
    deployment = read_deployment(url)
    return deployment is not None and deployment.is_cluster


def _without_options(url: str) -> str:
    """Leave out what only BullMQ's queues read, as REDIS_URL may have it also beside queues elsewhere."""
    for name in ("wait_replicas", "wait_timeout_ms", "metrics", "max_foreign_stalls"):
        url, _ = take_parameter(url, name)
    return url


def _client(url: str, timeout: timedelta = REDIS_TIMEOUT) -> Redis:
    from redis.asyncio.retry import Retry  # imported here, because a node without a Redis need not have the package
    from redis.backoff import NoBackoff

    from workers.storage.redis import client_of

    # No retries inside a command: a worker reports the outage and tries again itself, for as long as it lasts.
    settings: dict[str, Any] = {
        "decode_responses": True,
        "socket_timeout": timeout.total_seconds(),
        "socket_connect_timeout": REDIS_TIMEOUT.total_seconds(),
        "retry": Retry(NoBackoff(), 0),
    }
    return client_of(url, settings)


class TaskKeys:
    """Where tasks' deduplication keys are kept with BullMQ and Bull, whose queues keep none of ours.

    They are in the Redis of the queues, beside them. The first use connects to it, `close` disconnects.
    """

    def __init__(self, place: Redis | str, *, prefix: str) -> None:
        from workers.kv.redis import RedisKvStore  # imported here, as it needs the Redis package

        self._store = RedisKvStore(place, prefix=prefix)
        self._connecting = asyncio.Lock()
        self._connected = False

    async def store(self) -> RedisKvStore:
        """Return the store, connected.

        Raises:
            StorageUnavailable: Redis does not answer.
        """
        async with self._connecting:
            if not self._connected:
                await self._store.connect()
                self._connected = True
        return self._store

    async def close(self) -> None:
        """Disconnect. A second call does nothing."""
        if self._connected:
            self._connected = False
            await self._store.disconnect()
