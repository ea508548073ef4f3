"""The settings of a queue that few set, those of its worker among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from workers.checks import as_lease, check_callable
from workers.limits import Limit
from workers.retention import KEEP_FAILED, Retention, check_retention
from workers.worker.events import Observer
from workers.worker.options import WorkerOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions(WorkerOptions):
    """Settings of a `Queue` beside its concurrency, its attempts and how long results are kept.

    `keep_failed` says how long failed and cancelled jobs are kept. `makes_tables` says whether the tables of an
    embedded database are made at the first use; None stands for yes if the queue was given a URL. `lease` is how long a
    claim holds its job, `observers` hear what its worker does; see `WorkerOptions` for the rest.

    `limits` are stored with the queue when it is first used, by name: that of the jobs it is for, `"*"` for all jobs of
    the queue, or any other, which a `LimitKey` names. Jobs of a name in `limits` wait for that limit. So producers and
    workers give the same ones.

    Raises:
        ValueError, TypeError: a setting out of its range, or of another kind, by its name.
    """

    limits: Mapping[str, Limit] = field(default_factory=dict)
    keep_failed: Retention = KEEP_FAILED
    makes_tables: bool | None = None
    lease: timedelta | float = timedelta(seconds=30)
    observers: Iterable[Observer] = ()

    def __post_init__(self) -> None:
        WorkerOptions.__post_init__(self)  # `super()` does not know a class with slots
        check_retention(self.keep_failed)
        if not isinstance(self.limits, Mapping) or not all(isinstance(each, Limit) for each in self.limits.values()):
            raise TypeError(f"limits are by name, as {{'send': Limit('10/s')}}, not {self.limits!r}")
        object.__setattr__(self, "lease", as_lease("lease", self.lease))
        object.__setattr__(self, "observers", tuple(self.observers))
        for observer in self.observers:
            check_callable("each of observers", observer)
