"""The options of an enqueue of a task: as they are given, and as they are meant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal, TypedDict

from workers.checks import as_duration
from workers.deduplication import DeduplicationMode
from workers.jobs import AfterFailure, JobRef
from workers.jobs.job import as_jobs
from workers.specs import delay_until
from workers.tasks.declared import Task
from workers.tasks.queue import EnqueueOptions
from workers.tasks.unique import TakenKey, Unique, Uniqueness, as_period, as_unique, key_of_data, scope_of


class TaskOptions(TypedDict, total=False):
    """The options of an enqueue of a task; see `Tasks.enqueue_task`."""

    delay: timedelta | float
    at: datetime | None
    priority: int
    unique: Uniqueness | None
    deduplication_key: str | None
    deduplication_mode: DeduplicationMode | None
    deduplication_ttl: timedelta | float | None
    ordering_key: str | None
    after: Iterable[str | JobRef]
    after_failure: AfterFailure | Literal["fail", "run"]
    meta: Mapping[str, str] | None
    connection: object | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """The same, checked.

    Raises:
        TypeError, ValueError: an option of another kind or out of its range, by its name.
    """

    delay: timedelta | float = timedelta(0)
    at: datetime | None = None
    priority: int = 0
    unique: Uniqueness | None = None
    deduplication_key: str | None = None
    deduplication_mode: DeduplicationMode | None = None
    deduplication_ttl: timedelta | float | None = None
    ordering_key: str | None = None
    after: Iterable[str | JobRef] = ()
    after_failure: AfterFailure | Literal["fail", "run"] = AfterFailure.FAIL
    meta: Mapping[str, str] | None = field(default=None, repr=False)
    connection: object | None = None

    def __post_init__(self) -> None:
        delay = as_duration("delay", self.delay)  # of both, this is what counts from here on
        object.__setattr__(self, "delay", delay if self.at is None else delay_until(delay or None, self.at))
        object.__setattr__(self, "after", as_jobs(self.after))
        object.__setattr__(self, "after_failure", AfterFailure(self.after_failure))
        if self.deduplication_mode is not None:
            object.__setattr__(self, "deduplication_mode", DeduplicationMode(self.deduplication_mode))
        if self.deduplication_ttl is not None:
            if self.deduplication_key is None:
                raise ValueError("deduplication_ttl is for a deduplication_key; without one, the time is `unique`")
            object.__setattr__(self, "deduplication_ttl", as_period("deduplication_ttl", self.deduplication_ttl))

    def mode_of(self, task: Task) -> DeduplicationMode | None:
        """Return how the enqueue is deduplicated; None if it is not."""
        unique = self._unique(task)
        if self.deduplication_key is None:
            return None if unique is None else unique.mode
        if self.deduplication_mode is not None:
            return self.deduplication_mode
        return DeduplicationMode.THROTTLE if unique is None or self.deduplication_ttl is not None else unique.mode

    def key(self, task: Task, items: Sequence[object], usual: timedelta) -> TakenKey | None:
        """Return the key that these data of the task take, for `usual` unless something says how long.

        Raises:
            TypeError, ValueError: a bad key, or data that have none.
        """
        mode, unique, key = self.mode_of(task), self._unique(task), self.deduplication_key
        if mode is None:
            return None
        if key is None and unique is not None:
            key = key_of_data(task.name, unique, [task.completed(data) for data in items])
        assert key is not None
        period = self.deduplication_ttl or (unique and unique.period) or usual
        return TakenKey(scope_of(task.name, key), mode, as_duration("deduplication_ttl", period))

    def for_queue(self, key: TakenKey | None = None) -> EnqueueOptions:
        """Return what the queue is to know of them."""
        delay = as_duration("delay", self.delay)
        lasting = None if key is None else key.lasting
        usual = EnqueueOptions()
        return EnqueueOptions(
            delay=delay,
            priority=self.priority,
            ordering_key=self.ordering_key,
            deduplication_key=None if key is None else key.text,
            deduplication_mode=usual.deduplication_mode if key is None else key.mode,
            deduplication_ttl=None if lasting is None else delay + lasting,
            after=as_jobs(self.after),
            after_failure=AfterFailure(self.after_failure),
        )

    def _unique(self, task: Task) -> Unique | None:
        return task.unique if self.unique is None else as_unique("unique", self.unique)
