"""What each deduplication key should stand for, kept in the plainest way."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from workers.deduplication import Deduplication, DeduplicationMode
from workers.jobs import NewJob


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedKeyHolder:
    """Which job has a deduplication key; `until` by `throttle`, else for as long as its mode says."""

    job_id: str
    mode: DeduplicationMode
    until: datetime | None


class ExpectedKeys:
    """Who has which key."""

    def __init__(self) -> None:
        self._marks: dict[str, ExpectedKeyHolder] = {}

    def take(self, new: NewJob, asked: Deduplication, now: datetime) -> ExpectedKeyHolder | None:
        """The key is the new job's, or what has it."""
        mark = self._marks.get(asked.key)
        if mark is not None and (mark.until is None or mark.until > now):
            return mark
        ttl = asked.ttl if asked.mode is DeduplicationMode.THROTTLE else None
        until = None if ttl is None else now + new.delay + ttl
        self._marks[asked.key] = ExpectedKeyHolder(job_id=new.id, mode=asked.mode, until=until)
        return None

    def let_go(self, job_id: str, *, claimed: bool, over: bool) -> None:
        """A key by `simple` is free when its job is over, one by `debounce` when it is claimed too."""
        for key, mark in list(self._marks.items()):
            ends = over or (claimed and mark.mode is DeduplicationMode.DEBOUNCE)
            if mark.job_id == job_id and mark.until is None and ends:
                del self._marks[key]
