"""A line of ids in the order of their keys, which any id may leave early; and deduplication keys with their jobs."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Generic, TypeAlias, TypeVar

from workers.deduplication import DeduplicationMode

Key = TypeVar("Key", bound=tuple[object, ...])
Entry: TypeAlias = tuple[Key, str]

_SLACK: Final = 64


class Line(Generic[Key]):
    """A heap of `(key, id)` in which each id occurs once.

    Leaving early costs no search: the heap's entry stays behind and is skipped when it comes up. The heap is rebuilt
    when such entries outnumber the others.
    """

    def __init__(self) -> None:
        self._heap: list[Entry[Key]] = []
        self._present: dict[str, Entry[Key]] = {}

    def __len__(self) -> int:
        return len(self._present)

    def key(self, member: str) -> Key | None:
        """Return the key under which `member` is in the line, None when it is not."""
        entry = self._present.get(member)
        return None if entry is None else entry[0]

    def members(self) -> list[str]:
        """Return every id in the line, in no order."""
        return list(self._present)

    def add(self, key: Key, member: str) -> None:
        """Put `member` at `key`, and remove it from where it was before."""
        entry = (key, member)
        self._present[member] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._present) + _SLACK:
            self._rebuild()

    def discard(self, member: str) -> None:
        """Remove `member` from the line, if it is there."""
        if self._present.pop(member, None) is not None and len(self._heap) > 2 * len(self._present) + _SLACK:
            self._rebuild()

    def head(self) -> Entry[Key] | None:
        """Return the first entry without removing it, None when the line is empty."""
        heap = self._heap
        while heap and self._present.get(heap[0][1]) is not heap[0]:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def pop(self) -> Entry[Key]:
        """Remove the first entry and return it.

        Raises:
            IndexError: the line is empty.
        """
        entry = self.head()
        if entry is None:
            raise IndexError("pop from an empty line")
        heapq.heappop(self._heap)
        del self._present[entry[1]]
        return entry

    def _rebuild(self) -> None:
        self._heap = list(self._present.values())
        heapq.heapify(self._heap)


def is_over(until: tuple[datetime] | None, now: datetime) -> bool:
    """Tell whether an entry in a line of dates has reached its date."""
    return until is not None and until[0] <= now


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
