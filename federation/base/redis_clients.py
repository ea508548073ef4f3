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
BLOCKING_TIMEOUT: Final = timedelta(seconds=15)
"""For clients that a stock `bullmq.Worker` may be given. Idle, it blocks for 5 s, and up to 10 s for a delayed job.

A read that is given up meanwhile costs it seconds until its next look.
"""


def redis_client(settings: Settings, timeout: timedelta = REDIS_TIMEOUT) -> Redis | None:
    """Make a new client for the Redis of the queues, or for the one that is set beside them; None without a Redis.

    An answer that takes longer than `timeout` is given up.
    """
    url = keyless_redis_url(settings) or plain(settings.redis_url)
    if url is None:
        return None
    from redis.asyncio import Redis  # imported here, because a node without a Redis need not have the package
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    # No retries inside a command: a worker reports the outage and tries again itself, for as long as it lasts.
    client: Redis = Redis.from_url(
        url,
        decode_responses=True,
        socket_timeout=timeout.total_seconds(),
        socket_connect_timeout=REDIS_TIMEOUT.total_seconds(),
        retry=Retry(NoBackoff(), 0),
    )
    return client
