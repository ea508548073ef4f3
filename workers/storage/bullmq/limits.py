"""The limit of a whole queue, as BullMQ has it: a global concurrency, and a global rate limit, in the queue's `meta`.

BullMQ's rate counts in windows: as many jobs as it says may start at once, and the next when its time is over. So a
rate has a `burst` of its count, and no other. BullMQ limits neither names nor keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from workers.errors import Unsupported
from workers.jobs import JobState
from workers.limits import WHOLE_QUEUE, HeldBack, Limit, check_limits, read_rate
from workers.storage.bullmq.inspect import BullMQReading
from workers.storage.bullmq.scripts import LIMITS
from workers.storage.on_redis.node_values import moment, number, to_ms, whole

_FIELDS: Final = ("concurrency", "max", "duration")
_UNITS: Final = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}


class BullMQLimits(BullMQReading):
    """The part of a BullMQ storage that limits the queue."""

    def refuse_limits(self, limits: Mapping[str, Limit]) -> None:
        for name, limit in limits.items():
            if name != WHOLE_QUEUE:
                raise Unsupported(f"limit {name!r}: BullMQ limits only a whole queue, which is called {WHOLE_QUEUE!r}")
            if limit.rate is not None and limit.capacity != read_rate(limit.rate)[0]:
                raise Unsupported(
                    f"limit {name!r}: BullMQ lets as many jobs start at once as the rate has; leave `burst` out"
                )

    async def declare_limits(self, limits: Mapping[str, Limit]) -> None:
        """See `KeepsLimits.declare_limits`. What another program limited stays, unless this says more."""
        check_limits(limits)
        self.refuse_limits(limits)
        for limit in limits.values():
            rate = None if limit.rate is None else read_rate(limit.rate)
            counts = None if rate is None else (rate[0], to_ms(rate[1]))
            await self._queue.ask([self._lua.declare_limits(limit.version, limit.concurrency, counts)])

    async def declared_limits(self) -> dict[str, Limit]:
        """See `KeepsLimits.declared_limits`; the limit may be another program's, of version 0."""
        (concurrency, most, duration), version = await self._queue.ask(
            [("HMGET", self._lua["meta"], *_FIELDS), ("HGET", self._lua[LIMITS], "version")]
        )
        limit = Limit(_rate(most, duration), concurrency=whole(concurrency) or None, version=whole(version))
        return {} if limit == Limit(version=limit.version) else {WHOLE_QUEUE: limit}

    async def remove_limit(self, name: str) -> bool:
        """See `KeepsLimits.remove_limit`; whoever declared it."""
        if name != WHOLE_QUEUE:
            return False
        gone, _, _ = await self._queue.ask(
            [("HDEL", self._lua["meta"], *_FIELDS), ("DEL", self._lua[LIMITS]), self._lua.mark()]
        )
        return bool(gone)

    async def held_back(self, ids: Sequence[str]) -> list[HeldBack | None]:
        statuses = await self.status(ids)
        (concurrency, most), active, started, left_ms = await self._queue.ask(
            [
                ("HMGET", self._lua["meta"], "concurrency", "max"),
                ("LLEN", self._lua["active"]),
                ("GET", self._lua["limiter"]),
                ("PTTL", self._lua["limiter"]),
            ]
        )
        held = None
        if most is not None and left_ms > 0 and whole(started) >= whole(most):
            held = HeldBack(WHOLE_QUEUE, "", moment(self._queue.server_ms() + left_ms))
        elif concurrency is not None and active >= whole(concurrency):
            held = HeldBack(WHOLE_QUEUE, "", None)
        return [held if one is not None and one.state is JobState.QUEUED else None for one in statuses]


def _rate(most: object, duration: object) -> str | None:
    """Return the rate in the words of `Limit`; None if there is none, or no words for it."""
    count, per_ms = number(most), whole(duration)
    for unit, length in _UNITS.items() if count and per_ms else ():
        if per_ms % length == 0:
            units = "" if per_ms == length else per_ms // length
            with suppress(ValueError):
                return Limit(f"{count}/{units}{unit}").rate
    return None
