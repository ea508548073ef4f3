"""A line of ids in the order of their keys, which any id may leave early."""

from __future__ import annotations

import heapq
from datetime import datetime
from typing import Final, Generic, TypeAlias, TypeVar

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
