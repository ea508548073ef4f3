"""The settings of a worker that few set."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeAlias

from workers.checks import MAX_ATTEMPTS, as_duration, as_positive, check_callable, check_text, check_whole
from workers.crons import Cron
from workers.retry import BackoffStrategy, RetryPolicy, check_policy
from workers.serde import JsonSerde, Serde
from workers.worker.exchanges import MOST_SLOTS
from workers.worker.failures import OnFailed
from workers.worker.handlers import Middleware

NotReady: TypeAlias = Callable[[], Coroutine[object, object, None] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Settings of a `Worker` beside its concurrency, its lease and who observes it.

    A failed attempt is repeated by the job's own back-off, else the handler's, else `retry`. `backoffs` maps the names
    of custom back-offs of Node's jobs to functions of the attempt and the job's delay. A stop lets handlers finish for
    `grace`. Up to `overtime` attempts may run in addition, see `Job.leave_slot`. `on_failed` is called with each job
    that fails for good here, see `OnFailed`. `middlewares` go around each attempt. `not_ready` is called before each
    claim. It returns None, or something to await before anything is claimed, such as the return of a database that all
    handlers need. `poll_interval` bounds how long an idle worker relies on the storage to wake it; more than a minute
    counts as one, so that lists of workers tell idle ones from dead ones. `crons` are stored at the start; every
    worker ticks whatever recurs in the queue. Durations may be numbers of seconds.

    Raises:
        ValueError, TypeError: a setting out of its range, or of another kind, by its name.
    """

    retry: RetryPolicy | None = None
    backoffs: Mapping[str, BackoffStrategy] = field(default_factory=dict)
    grace: timedelta | float = timedelta(seconds=20)
    overtime: int = 0
    max_stalls: int = 3
    on_failed: OnFailed | None = None
    middlewares: Sequence[Middleware] = ()
    not_ready: NotReady | None = None
    poll_interval: timedelta | float = timedelta(seconds=60)
    worker_id: str | None = None
    payload_serde: Serde = field(default_factory=JsonSerde)
    result_serde: Serde = field(default_factory=JsonSerde)
    crons: Iterable[Cron] = ()

    def __post_init__(self) -> None:
        check_policy("retry", self.retry)
        check_whole("overtime", self.overtime, 0, MOST_SLOTS)
        check_whole("max_stalls", self.max_stalls, 0, MAX_ATTEMPTS)
        if self.worker_id is not None:
            check_text("worker id", self.worker_id)
        grace = as_duration("grace", self.grace)
        if grace < timedelta(0):
            raise ValueError(f"grace is a time from zero on, not {grace!r}")
        object.__setattr__(self, "grace", grace)
        object.__setattr__(self, "poll_interval", as_positive("poll_interval", self.poll_interval))
        object.__setattr__(self, "middlewares", tuple(self.middlewares))
        object.__setattr__(self, "crons", tuple(self.crons))
        self._check_functions()

    def _check_functions(self) -> None:
        """Refuse what would fail with the first job."""
        for what in ("on_failed", "not_ready"):
            if getattr(self, what) is not None:
                check_callable(what, getattr(self, what))
        for what in ("payload_serde", "result_serde"):
            for verb in ("dumps", "loads"):
                check_callable(f"{what}.{verb}", getattr(getattr(self, what), verb, None))
        for middleware in self.middlewares:
            check_callable("each of middlewares", middleware)
        for name, strategy in self.backoffs.items():
            check_callable(f"{name!r} of backoffs", strategy)
        for cron in self.crons:
            if not isinstance(cron, Cron):
                raise TypeError(f"each of crons is a Cron, not {cron!r}")
