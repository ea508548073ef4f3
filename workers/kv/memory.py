"""A key-value store in this process: for tests, and for queues that live in it too."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from workers.clock import Clock, SystemClock
from workers.kv.base import Key, check_value, encode_key, ttl_ms

_FEW: Final = 64


class MemoryKvStore:
    """A `ConditionalKvStore` for one event loop; it holds at most twice as many values as were alive at once."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or SystemClock()
        self._entries: dict[str, tuple[bytes, datetime]] = {}
        self._swept_at = _FEW

    def __len__(self) -> int:
        """Return how many values are held, including those that expired since the last sweep."""
        return len(self._entries)

    async def get(self, key: Key) -> bytes | None:
        return self._alive(encode_key(key))

    async def set(self, key: Key, value: bytes, *, ttl: timedelta) -> None:
        self._put(encode_key(key), self._entry(value, ttl))

    async def set_if_absent(self, key: Key, value: bytes, *, ttl: timedelta) -> bytes | None:
        place, entry = encode_key(key), self._entry(value, ttl)
        found = self._alive(place)
        if found is None:
            self._put(place, entry)
        return found

    async def compare_and_set(self, key: Key, expected: bytes, value: bytes, *, ttl: timedelta) -> bool:
        place, entry = encode_key(key), self._entry(value, ttl)
        holds = self._alive(place) == expected
        if holds:
            self._put(place, entry)
        return holds

    async def compare_and_delete(self, key: Key, expected: bytes) -> bool:
        place = encode_key(key)
        holds = self._alive(place) == expected
        if holds:
            del self._entries[place]
        return holds

    def _entry(self, value: bytes, ttl: timedelta) -> tuple[bytes, datetime]:
        check_value(value)
        return value, self._clock.now() + timedelta(milliseconds=ttl_ms(ttl))

    def _alive(self, place: str) -> bytes | None:
        value, expires = self._entries.get(place, (None, None))
        return value if expires is not None and self._clock.now() < expires else None

    def _put(self, place: str, entry: tuple[bytes, datetime]) -> None:
        self._entries[place] = entry
        if len(self._entries) >= self._swept_at:
            now = self._clock.now()
            self._entries = {place: entry for place, entry in self._entries.items() if now < entry[1]}
            self._swept_at = max(_FEW, 2 * len(self._entries))
