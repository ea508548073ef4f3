"""The limits that a queue should have, and when a bucket should have a token."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from workers.gates import HeldBack, Limit, LimitKey


class ExpectedLimits:
    """The limits by name, and when the bucket of each key is full again: at the earliest, and at the latest.

    The two differ when a limit has changed so that the bucket would take longer to fill than an empty one. Then it
    counts as empty from when the storage next looks at it, which may be soon or late.
    """

    def __init__(self) -> None:
        self.declared: dict[str, Limit] = {}
        self._full: dict[LimitKey, tuple[datetime, datetime]] = {}

    def declare(self, limits: Mapping[str, Limit], now: datetime) -> None:
        """Keep each limit, unless the one kept has a higher version."""
        for name, limit in limits.items():
            if name not in self.declared or limit.version >= self.declared[name].version:
                self.declared[name] = limit
        for key, (earliest, latest) in self._full.items():
            self._full[key] = (self._at_most_empty(key, earliest, now), latest)

    def remove(self, name: str) -> bool:
        """Forget the limit, and return what `remove_limit` should answer."""
        return self.declared.pop(name, None) is not None

    def start(self, key: LimitKey, now: datetime) -> None:
        """Take a token, if the limit has any."""
        limit = self.declared.get(key.limit)
        if limit is not None and limit.interval is not None:
            earliest, latest = self._full_at(key, now)
            self._full[key] = (max(earliest, now) + limit.interval, max(latest, now) + limit.interval)

    def holds_back(self, key: LimitKey, running: int, now: datetime) -> tuple[HeldBack | None, HeldBack | None]:
        """Return what keeps a job of this key back, at best and at worst, when so many are running."""
        limit = self.declared.get(key.limit)
        if limit is not None and limit.concurrency is not None and running >= limit.concurrency:
            return (HeldBack(*key, None),) * 2
        if limit is None or limit.interval is None:
            return None, None
        best, worst = (full_at - (limit.capacity - 1) * limit.interval for full_at in self._full_at(key, now))
        return _until(key, best, now), _until(key, worst, now)

    def _full_at(self, key: LimitKey, now: datetime) -> tuple[datetime, datetime]:
        earliest, latest = self._full.get(key, (now, now))
        return self._at_most_empty(key, earliest, now), self._at_most_empty(key, latest, now)

    def _at_most_empty(self, key: LimitKey, full_at: datetime, now: datetime) -> datetime:
        limit = self.declared.get(key.limit)
        if limit is None or limit.interval is None:
            return full_at
        return min(full_at, now + limit.capacity * limit.interval)


def _until(key: LimitKey, opens: datetime, now: datetime) -> HeldBack | None:
    return HeldBack(*key, opens) if opens > now else None
