"""A Redis client as the processes of a node use it."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from federation.base.setting_types import plain
from federation.base.settings import Settings
from federation.base.storages import keyless_redis_url

if TYPE_CHECKING:
    from redis.asyncio import Redis

REDIS_TIMEOUT: Final = timedelta(seconds=5)


def redis_client(settings: Settings) -> Redis | None:
    """Make a new client for the Redis of the queues, or for the one that is set beside them; None without a Redis."""
    url = keyless_redis_url(settings) or plain(settings.redis_url)
    if url is None:
        return None
    from redis.asyncio import Redis  # imported here, because a node without a Redis need not have the package
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    seconds = REDIS_TIMEOUT.total_seconds()
    # No retries inside a command: a worker reports the outage and tries again itself, for as long as it lasts.
    client: Redis = Redis.from_url(
        url,
        decode_responses=True,
        socket_timeout=seconds,
        socket_connect_timeout=seconds,
        retry=Retry(NoBackoff(), 0),
    )
    return client
