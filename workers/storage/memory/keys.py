"""Which job each deduplication key of an in-memory queue stands for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from workers.deduplication import DeduplicationMode
from workers.storage.memory.line import Line, is_over


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyHolder:
    """Which job a deduplication key stands for; `until` with `throttle`, else for as long as the job lets it."""

    job_id: str
    mode: DeduplicationMode
    until: datetime | None = None


class KeyTable:
    """Deduplication keys and their marks, and when those of `throttle` are over."""

    def __init__(self) -> None:
        self._marks: dict[str, KeyHolder] = {}
        self._keys: dict[str, str] = {}  # of the jobs that are to let go of one
        self._ending_marks: Line[tuple[datetime]] = Line()

    def marked(self, key: str, now: datetime) -> KeyHolder | None:
        """What has the key at `now`."""
        mark = self._marks.get(key)
        return None if mark is None or (mark.until is not None and mark.until <= now) else mark

    def mark(self, key: str, mark: KeyHolder | None) -> None:
        """The key is that mark's, and no other's; with None it is free."""
        old = self._marks.pop(key, None)
        if old is not None and self._keys.get(old.job_id) == key:
            del self._keys[old.job_id]
        self._ending_marks.discard(key)
        if mark is None:
            return
        self._marks[key] = mark
        if mark.until is None:
            self._keys[mark.job_id] = key
        else:
            self._ending_marks.add((mark.until,), key)

    def let_go(self, job_id: str, *, claimed: bool = False) -> None:
        """The job that ends, or is claimed, has its key no longer."""
        key = self._keys.get(job_id)
        if key is not None and (not claimed or self._marks[key].mode is DeduplicationMode.DEBOUNCE):
            self.mark(key, None)

    def free_what_is_over(self, now: datetime) -> Iterator[str]:
        """Keys whose time is over at `now`, each free before it is yielded."""
        while (head := self._ending_marks.head()) is not None and is_over(head[0], now):
            self.mark(head[1], None)
            yield head[1]
