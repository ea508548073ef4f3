"""How often somebody may ask: sliding windows, in Redis or in this process.

Theory of operation. A window remembers when it was last asked, refusals included, so hammering prolongs the block. To
know whether more than n requests came within it, the times of the newest n + 1 are enough: older ones are dropped, and
a flood costs no more memory than its limit. The keys in Redis are those that other implementations use.

If n is large, that would be too much to remember for everybody. Then requests are counted, in stretches of time as long
as the window; the previous stretch counts by the part of it that the window still covers.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Protocol

import structlog

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = structlog.get_logger(__name__)

MAX_WINDOWS: Final = 10_000
"""How many windows a process keeps; those asked least recently are dropped first."""
MAX_REMEMBERED: Final = 500
"""Up to this limit the time of each request is remembered."""
REDIS_TIMEOUT: Final = timedelta(milliseconds=500)
REDIS_PAUSE: Final = timedelta(seconds=5)
"""How long a Redis that failed is left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """At most that many requests in any *window*."""

    requests: int
    window: timedelta

    @property
    def counts(self) -> bool:
        """Whether requests are counted instead of remembered."""
        return self.requests > MAX_REMEMBERED


def deliveries_limit(requests: int) -> Limit:
    """Return the limit of that many follows, posts or activities, in the window of the other implementation."""
    return Limit(requests=requests, window=timedelta(seconds=10))


NEW_SERVERS_PER_CLIENT: Final = Limit(requests=10, window=timedelta(hours=1))
NEW_SERVERS_PER_NETWORK: Final = Limit(requests=100, window=timedelta(hours=1))
NEW_SERVERS: Final = Limit(requests=1600, window=timedelta(hours=1))
"""A network has a sixteenth of them."""
KEYS_PER_CLIENT: Final = Limit(requests=300, window=timedelta(minutes=1))
"""Keys of actors, which are asked of servers that we know."""


@dataclass(slots=True)
class _Count:
    """How many requests came in one stretch of time, and in the one before."""

    stretch: int
    requests: int = 0
    before: int = 0

    def add(self, stretch: int) -> None:
        """Count one more request, in *stretch*."""
        if stretch != self.stretch:
            self.before = self.requests if stretch == self.stretch + 1 else 0
            self.stretch, self.requests = stretch, 0
        self.requests += 1


class Windows(Protocol):
    """Counts requests by whatever they are limited by."""

    async def allows(self, subject: str, limit: Limit) -> bool:
        """Count this request of *subject*, and return whether it is within the limit."""
        ...


async def spent_on_new_servers(windows: Windows, *, client: str | None, network: str | None) -> Limit | None:
    """Count a server that we get to know for others, by client, by network, and in all; return the limit exceeded.

    To be asked before the first request to such a server, by whatever would make us send it. What one limit refuses
    does not count for the next, so that nobody spends what belongs to others.
    """
    limits = ((client, NEW_SERVERS_PER_CLIENT), (network, NEW_SERVERS_PER_NETWORK), ("all", NEW_SERVERS))
    for subject, limit in limits:
        if subject is not None and not await windows.allows(f"register:{subject}", limit):
            return limit
    return None


async def spent_on_keys(windows: Windows, *, client: str | None) -> Limit | None:
    """Count a key that we fetch for others from a server that we know; return the limit exceeded."""
    allows = await windows.allows(f"keys:{client or 'unknown'}", KEYS_PER_CLIENT)
    return None if allows else KEYS_PER_CLIENT


class MemoryWindows:
    """Windows of this process only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: OrderedDict[str, deque[float]] = OrderedDict()
        self._counts: OrderedDict[str, _Count] = OrderedDict()

    async def allows(self, subject: str, limit: Limit) -> bool:
        now = self._clock()
        if limit.counts:
            return self._counted(subject, limit, now)
        times = self._times.setdefault(subject, deque(maxlen=limit.requests + 1))
        self._times.move_to_end(subject)
        if len(self._times) > MAX_WINDOWS:
            self._times.popitem(last=False)
        times.append(now)
        return len(times) <= limit.requests or times[0] <= now - limit.window.total_seconds()

    def _counted(self, subject: str, limit: Limit, now: float) -> bool:
        stretch, part = divmod(now / limit.window.total_seconds(), 1)
        count = self._counts.setdefault(subject, _Count(int(stretch)))
        self._counts.move_to_end(subject)
        if len(self._counts) > MAX_WINDOWS:
            self._counts.popitem(last=False)
        count.add(int(stretch))
        return count.requests + count.before * (1 - part) <= limit.requests


class RedisWindows:
    """Windows that all processes on one Redis share. While it does not answer, this process counts for itself."""

    def __init__(self, redis: Redis, clock: Callable[[], float] = time.time) -> None:
        self._redis = redis
        self._clock = clock
        self._meanwhile = MemoryWindows()
        self._ask_again = 0.0

    async def allows(self, subject: str, limit: Limit) -> bool:
        if time.monotonic() >= self._ask_again:
            try:
                asked = self._counted if limit.counts else self._count
                return await asked(f"rl:{subject}", limit) <= limit.requests
            except _redis_failures() as error:
                self._ask_again = time.monotonic() + REDIS_PAUSE.total_seconds()
                log.warning("rate_limits_not_shared", error=type(error).__name__)
        return await self._meanwhile.allows(subject, limit)

    async def _counted(self, key: str, limit: Limit) -> float:
        seconds = limit.window.total_seconds()
        stretch, part = divmod(self._clock() / seconds, 1)
        current = f"{key}:{stretch:.0f}"
        async with asyncio.timeout(REDIS_TIMEOUT.total_seconds()), self._redis.pipeline(transaction=True) as pipe:
            pipe.incr(current)
            pipe.pexpire(current, round(2000 * seconds))
            pipe.get(f"{key}:{stretch - 1:.0f}")
            requests, _, before = await pipe.execute()
            return float(requests) + float(before or 0) * (1 - part)

    async def _count(self, key: str, limit: Limit) -> int:
        now = round(self._clock() * 1000)
        window = round(limit.window.total_seconds() * 1000)
        async with asyncio.timeout(REDIS_TIMEOUT.total_seconds()), self._redis.pipeline(transaction=True) as pipe:
            pipe.zremrangebyscore(key, "-inf", now - window)
            pipe.zadd(key, {f"{now}-{secrets.token_hex(8)}": now})
            pipe.zremrangebyrank(key, 0, -(limit.requests + 2))
            pipe.zcard(key)
            pipe.pexpire(key, window + 1000)
            *_, count, _ = await pipe.execute()
            return int(count)


def _redis_failures() -> tuple[type[Exception], ...]:
    from redis.exceptions import RedisError  # imported here, because a node without a Redis need not have the package

    return (RedisError, OSError)  # a deadline is an OSError, too
