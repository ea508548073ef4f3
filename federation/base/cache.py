"""A small cache for values read from the database again and again, with one load at a time per key."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Final, Generic, TypeVar

from federation.base.single_flight import SingleFlight
from workers.clock import monotonic

V = TypeVar("V")

MAX_ENTRIES: Final = 10_000


class LoadingCache(Generic[V]):
    """Values by text key, loaded on demand and kept for `ttl`; concurrent readers of one key share one load.

    It holds `max_entries` at most, and drops the least recently loaded ones first. A load that fails is not remembered.
    If a key is dropped while its load is under way, the next reader loads it again, so nobody sees a value older than
    the drop for long.
    """

    def __init__(self, load: Callable[[str], Awaitable[V]], *, ttl: timedelta, max_entries: int = MAX_ENTRIES) -> None:
        self._load = load
        self._max_entries = max_entries
        self._ttl = ttl.total_seconds()
        self._entries: OrderedDict[str, tuple[float, V]] = OrderedDict()
        self._loads: SingleFlight[V] = SingleFlight()

    async def get(self, key: str) -> V:
        """Return the value for `key`, at most `ttl` old."""
        entry = self._entries.get(key)
        if entry is not None and entry[0] > monotonic():
            return entry[1]
        return await self._loads.run(key, lambda: self._fill(key))

    def put(self, key: str, value: V) -> None:
        """Set the value of `key`. A load under way for it is older, and is not remembered."""
        self._loads.forget(key)
        self._remember(key, value)

    def drop(self, key: str) -> None:
        """Forget `key`: the next reader loads it anew."""
        self._entries.pop(key, None)
        self._loads.forget(key)

    async def close(self) -> None:
        """Cancel all loads, and wait for their end."""
        await self._loads.close()

    async def _fill(self, key: str) -> V:
        value = await self._load(key)
        if self._loads.is_current(key):  # not dropped meanwhile
            self._remember(key, value)
        return value

    def _remember(self, key: str, value: V) -> None:
        self._entries[key] = (monotonic() + self._ttl, value)
        self._entries.move_to_end(key)
        if len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)
