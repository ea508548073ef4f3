"""The deduplication keys of an in-memory queue, and the jobs that have them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from workers.deduplication import DeduplicationMode
from workers.storage.memory.line import Line, is_over


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyHolder:
    """The job that has a deduplication key; `until` with `throttle`, otherwise for as long as the job keeps it."""

    job_id: str
    mode: DeduplicationMode
    until: datetime | None = None


class KeyTable:
    """Deduplication keys and their holders, and the ends of those by `throttle`."""

    def __init__(self) -> None:
        self._holders: dict[str, KeyHolder] = {}
        self._keys: dict[str, str] = {}  # by the id of the job that has to release it
        self._ending: Line[tuple[datetime]] = Line()

    def holder_of(self, key: str, now: datetime) -> KeyHolder | None:
        """Return who has the key at `now`."""
        holder = self._holders.get(key)
        return None if holder is None or (holder.until is not None and holder.until <= now) else holder

    def give(self, key: str, holder: KeyHolder | None) -> None:
        """Give the key to that holder alone; with None it is free."""
        old = self._holders.pop(key, None)
        if old is not None and self._keys.get(old.job_id) == key:
            del self._keys[old.job_id]
        self._ending.discard(key)
        if holder is None:
            return
        self._holders[key] = holder
        if holder.until is None:
            self._keys[holder.job_id] = key
        else:
            self._ending.add((holder.until,), key)

    def let_go(self, job_id: str, *, claimed: bool = False) -> None:
        """Free the key of a job that ends or is claimed."""
        key = self._keys.get(job_id)
        if key is not None and (not claimed or self._holders[key].mode is DeduplicationMode.DEBOUNCE):
            self.give(key, None)

    def free_what_is_over(self, now: datetime) -> Iterator[str]:
        """Free the keys whose time is over at `now`, and yield each once it is free."""
        while (head := self._ending.head()) is not None and is_over(head[0], now):
            self.give(head[1], None)
            yield head[1]
