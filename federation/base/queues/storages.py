"""Where the queues live: opens the storage that the settings choose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from db.url import parse_url
from federation.base.errors import ConfigurationError
from federation.base.settings.settings import Settings
from federation.base.settings.types import plain
from workers.storage import open_storage as storage_from_url
from workers.storage.base import Storage
from workers.storage.redis_urls import read_deployment, take_parameter

if TYPE_CHECKING:
    import redis.asyncio

BULL: Final = "bull+"
BULLMQ: Final = "bullmq+"


def bullmq_url(settings: Settings) -> str | None:
    """Return the URL of the Redis with the BullMQ queues, or None if they live elsewhere.

    Raises:
        ConfigurationError: the queues' prefix does not fit a cluster.
    """
    chosen = _chosen_for_bullmq(settings)
    if chosen is None:
        return None
    from workers.storage.bullmq import server_url

    return server_url(chosen)


def _chosen_for_bullmq(settings: Settings) -> str | None:
    """Return what was set as the place of BullMQ queues, with what it says about jobs of Node.

    Raises:
        ConfigurationError: the queues' prefix does not fit a cluster.
    """
    chosen = plain(settings.queue_url)
    if chosen is None:
        return plain(settings.redis_url)
    if not chosen.startswith(BULLMQ):
        return None
    url = chosen.removeprefix(BULLMQ)
    _check_prefix(url, settings.federation_queue_prefix)
    return url


def keyless_redis_url(settings: Settings) -> str | None:
    """Return the Redis of BullMQ's or Bull's queues, or None if the queues live elsewhere.

    These queues keep no deduplication keys.
    """
    chosen = plain(settings.queue_url) or ""
    if not chosen.startswith(BULL):
        return bullmq_url(settings)
    from workers.storage.bull import server_url

    return server_url(chosen)


def queue_place(settings: Settings) -> str:
    """Describe where the queues live, for people and to compare processes; without user, password or options."""
    url = _chosen_for_bullmq(settings)
    kind, text = ("BullMQ", url) if url is not None else ("", plain(settings.queue_url))
    if text is None:
        return "the database"
    parts = urlsplit(text.removeprefix(BULL))
    hosts = ",".join(sorted(_host(each) for each in parts.netloc.rpartition("@")[2].lower().split(",")))
    place = f"{kind or text.partition(':')[0]} at {hosts}{parts.path}"
    keyed = kind or text.startswith((BULL, "redis"))
    return f"{place}, prefix {settings.federation_queue_prefix}" if keyed else place


def _host(address: str) -> str:
    host, colon, port = address.partition(":")
    return f"127.0.0.1{colon}{port}" if host == "localhost" else address


def _check_prefix(url: str, prefix: str) -> None:
    deployment = read_deployment(url)
    if deployment is not None and deployment.is_cluster and "{" not in prefix:
        problem = f"for BullMQ's queues on a cluster it has to be in braces, as {{{prefix}}}"
        raise ConfigurationError([f"FEDERATION_QUEUE_PREFIX: {problem}"])


def is_plain(url: str) -> bool:
    """Tell whether a client of redis-py's stands for this URL: one server, and no replicas to wait for."""
    return read_deployment(url) is None and take_parameter(url, "wait_replicas")[1] is None


def open_storage(settings: Settings, queue: str, *, client: redis.asyncio.Redis | None = None) -> Storage:
    """Open the storage of one queue.

    It lives where QUEUE_URL says, or else in BullMQ on REDIS_URL, or else in the application's own database. `client`
    is used for BullMQ instead of a connection of its own, if the URL `is_plain`.
    """
    chosen = _chosen_for_bullmq(settings)
    prefix, allowed = settings.federation_queue_prefix, settings.federation_allow_eviction
    if chosen is not None:
        from workers.storage.bullmq import BullMQStorage, metrics_of, stalls_of

        lent = client if is_plain(chosen) else None
        return BullMQStorage(
            lent or chosen,
            queue,
            prefix=prefix,
            metrics=metrics_of(chosen),
            max_foreign_stalls=stalls_of(chosen),
            allow_eviction=allowed,
        )
    url = (settings.queue_url or settings.database_url).get_secret_value()
    if url.startswith(BULL):
        from workers.storage.bull import BullStorage

        return BullStorage(url, queue, prefix=prefix, allow_eviction=allowed)
    if url.startswith("redis"):
        from workers.storage.redis import RedisStorage

        return RedisStorage(url, queue, prefix=prefix, allow_eviction=allowed)
    if url.startswith("file:"):
        return storage_from_url(url, queue=queue)
    from workers.storage.sql import SqlStorage

    return SqlStorage(parse_url(url), queue)
