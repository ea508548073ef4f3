"""The job that each deduplication key should belong to, kept in the simplest way."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from workers.deduplication import Deduplication, DeduplicationMode
from workers.jobs import NewJob


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedKeyHolder:
    """The job that has a deduplication key; `until` by `throttle`, otherwise for as long as its mode says."""

    job_id: str
    mode: DeduplicationMode
    until: datetime | None


class ExpectedKeys:
    """All deduplication keys, and the jobs that have them."""

    def __init__(self) -> None:
        self._holders: dict[str, ExpectedKeyHolder] = {}

    def take(self, new: NewJob, asked: Deduplication, now: datetime) -> ExpectedKeyHolder | None:
        """Give the key to the new job, or return the holder that has it."""
        holder = self._holders.get(asked.key)
        if holder is not None and (holder.until is None or holder.until > now):
            return holder
        ttl = asked.ttl if asked.mode is DeduplicationMode.THROTTLE else None
        until = None if ttl is None else now + new.delay + ttl
        self._holders[asked.key] = ExpectedKeyHolder(job_id=new.id, mode=asked.mode, until=until)
        return None

    def let_go(self, job_id: str, *, claimed: bool, over: bool) -> None:
        """Free the keys of a job that is over; a key by `debounce` is free when the job is claimed, too."""
        for key, holder in list(self._holders.items()):
            ends = over or (claimed and holder.mode is DeduplicationMode.DEBOUNCE)
            if holder.job_id == job_id and holder.until is None and ends:
                del self._holders[key]
