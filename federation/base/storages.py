"""Where the queues live: opens the storage that the settings choose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from db.url import parse_url
from federation.base.setting_types import plain
from federation.base.settings import Settings
from workers.storage import open_storage as storage_from_url
from workers.storage.base import Storage

if TYPE_CHECKING:
    import redis.asyncio

BULL_SCHEMES: Final = ("bull+redis://", "bull+rediss://")


def bullmq_url(settings: Settings) -> str | None:
    """Return the URL of the Redis with the BullMQ queues, or None if they live elsewhere."""
    chosen = _chosen_for_bullmq(settings)
    if chosen is None:
        return None
    from workers.storage.bullmq import server_url

    return server_url(chosen)


def _chosen_for_bullmq(settings: Settings) -> str | None:
    """Return what was set as the place of BullMQ queues, with what it says about jobs of Node."""
    chosen = plain(settings.queue_url)
    if chosen is None:
        return plain(settings.redis_url)
    scheme = chosen.partition("://")[0]
    return chosen.removeprefix("bullmq+") if scheme in ("bullmq+redis", "bullmq+rediss") else None


def keyless_redis_url(settings: Settings) -> str | None:
    """Return the Redis of BullMQ's or Bull's queues, or None if the queues live elsewhere.

    These queues keep no deduplication keys.
    """
    chosen = plain(settings.queue_url) or ""
    if not chosen.startswith(BULL_SCHEMES):
        return bullmq_url(settings)
    from workers.storage.bull import server_url

    return server_url(chosen)


def queue_place(settings: Settings) -> str:
    """Describe where the queues live, for people and to compare processes; without user, password or options."""
    url = _chosen_for_bullmq(settings)
    kind, text = ("BullMQ", url) if url is not None else ("", plain(settings.queue_url))
    if text is None:
        return "the database"
    parts = urlsplit(text.removeprefix("bull+"))
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname or ""
    port = f":{parts.port}" if parts.port else ""
    place = f"{kind or text.partition(':')[0]} at {host}{port}{parts.path}"
    keyed = kind or text.startswith((*BULL_SCHEMES, "redis"))
    return f"{place}, prefix {settings.federation_queue_prefix}" if keyed else place


def open_storage(settings: Settings, queue: str, *, client: redis.asyncio.Redis | None = None) -> Storage:
    """Open the storage of one queue.

    It lives where QUEUE_URL says, or else in BullMQ on REDIS_URL, or else in the application's own database. `client`
    is used for BullMQ instead of a connection of its own.
    """
    chosen = _chosen_for_bullmq(settings)
    if chosen is not None:
        from workers.storage.bullmq import BullMQStorage, metrics_of

        return BullMQStorage(
            client or chosen,
            queue,
            prefix=settings.federation_queue_prefix,
            metrics=metrics_of(chosen),
        )
    url = (settings.queue_url or settings.database_url).get_secret_value()
    if url.startswith(BULL_SCHEMES):
        from workers.storage.bull import BullStorage

        return BullStorage(url, queue, prefix=settings.federation_queue_prefix)
    if url.startswith(("redis://", "rediss://")):
        from workers.storage.redis import RedisStorage

        return RedisStorage(url, queue, prefix=settings.federation_queue_prefix)
    if url.startswith("file:"):
        return storage_from_url(url, queue=queue)
    from workers.storage.sql import SqlStorage

    return SqlStorage(parse_url(url), queue)
