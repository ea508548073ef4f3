"""A queue that accepts jobs with the options of BullMQ, on any storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from federation.base.errors import ConfigurationError
from federation.base.redis_clients import bullmq_connection
from workers.checks import MAX_DELAY
from workers.jobs import DROP, Retention
from workers.queue import Queue
from workers.retry import RetryPolicy
from workers.specs import DEFAULT_NAME, Enqueued, JobSpec
from workers.storage.base import Storage

if TYPE_CHECKING:
    import bullmq

MAX_NUMBER: Final = 2**53
"""The largest number up to which BullMQ's scripts count exactly."""

_OPTIONS: Final = frozenset({"jobId", "delay", "attempts", "backoff", "priority", "removeOnComplete", "removeOnFail"})


class JobQueue(Queue):
    """The core's queue, with BullMQ's way of adding jobs."""

    def __init__(
        self,
        storage: Storage,
        *,
        max_attempts: int = 1,
        backoff: RetryPolicy | None = None,
        keep_completed: Retention = timedelta(hours=1),
        keep_failed: Retention = timedelta(hours=1),
        redis_url: str | None = None,
        prefix: str = "bull",
    ) -> None:
        super().__init__(storage, max_attempts=max_attempts)
        self._defaults = JobSpec(payload=None, backoff=backoff, keep_completed=keep_completed, keep_failed=keep_failed)
        self._redis_url = redis_url
        self._prefix = prefix
        self._raw: bullmq.Queue | None = None

    def spec(self, name: str, data: object, opts: Mapping[str, object] | None = None) -> JobSpec:
        """Return a job with this queue's defaults, changed by BullMQ's options.

        Known options: `jobId`, `delay` (ms), `attempts`, `backoff` (ms, or `{type, delay, jitter}` with type `fixed` or
        `exponential`), `priority`, `removeOnComplete`, `removeOnFail` (a bool, or `{age}` in seconds).

        Raises:
            ValueError: an unknown option, or a value that BullMQ would not accept; the message says which.
        """
        return _with_options(self._defaults, name or DEFAULT_NAME, data, opts or {})

    async def add(self, name: str, data: object, opts: Mapping[str, object] | None = None) -> Enqueued:
        """Add one job; see `spec` and `Queue.enqueue`. Repeating it with the same `jobId` adds nothing."""
        return (await self.add_bulk([(name, data, opts)]))[0]

    async def add_bulk(
        self, jobs: Sequence[tuple[str, object, Mapping[str, object] | None]], *, connection: object | None = None
    ) -> list[Enqueued]:
        """Add many jobs in one round trip, otherwise as `add`; `connection` joins the caller's SQL transaction."""
        return await self.enqueue_many([self.spec(*job) for job in jobs], connection=connection)

    def add_bulk_on(
        self, connection: object, jobs: Sequence[tuple[str, object, Mapping[str, object] | None]]
    ) -> list[Enqueued]:
        """Add the jobs as `add_bulk` does, in a synchronous caller's transaction; see `Queue.enqueue_on`."""
        return self.enqueue_on(connection, [self.spec(*job) for job in jobs])

    @property
    def raw(self) -> bullmq.Queue:
        """The stock `bullmq.Queue` on the same keys, for flows, job schedulers and rate limits.

        Raises:
            ConfigurationError: this queue is not on BullMQ.
        """
        if self._redis_url is None:
            raise ConfigurationError(["REDIS_URL: not set, so this queue is not a BullMQ queue"])
        if self._raw is None:
            import bullmq

            connection = bullmq_connection(self._redis_url)
            self._raw = bullmq.Queue(self.storage.queue, {"connection": connection, "prefix": self._prefix})
        return self._raw

    async def stop(self) -> None:
        await super().stop()
        if self._raw is not None:
            await self._raw.close()
            self._raw = None


def _with_options(defaults: JobSpec, name: str, data: object, opts: Mapping[str, object]) -> JobSpec:
    unknown = opts.keys() - _OPTIONS
    if unknown:
        raise ValueError(f"job options {sorted(unknown)} are not supported; known are {sorted(_OPTIONS)}")
    return JobSpec(
        payload=data,
        name=name,
        id=_job_id(opts.get("jobId")),
        delay=timedelta(milliseconds=_number("delay", opts.get("delay", 0))),
        max_attempts=int(_number("attempts", opts["attempts"])) or 1 if "attempts" in opts else None,
        priority=int(_number("priority", opts.get("priority", 0))),
        backoff=_backoff(opts["backoff"]) if "backoff" in opts else defaults.backoff,
        keep_completed=_retention("removeOnComplete", opts, defaults.keep_completed),
        keep_failed=_retention("removeOnFail", opts, defaults.keep_failed),
    )


def _job_id(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"job option 'jobId' must be a text, not {value!r}")
    return value


def _number(option: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_NUMBER:
        raise ValueError(f"job option {option!r} must be a number from 0 to {MAX_NUMBER}, not {value!r}")
    return value


def _backoff(value: object) -> RetryPolicy:
    if not isinstance(value, Mapping):
        return RetryPolicy(
            initial=timedelta(milliseconds=_number("backoff", value)), multiplier=1, maximum=MAX_DELAY, jitter=0
        )
    kind = value.get("type")
    if kind not in ("fixed", "exponential"):
        raise ValueError(f"job option 'backoff' must have type fixed or exponential, not {kind!r}")
    return RetryPolicy(
        initial=timedelta(milliseconds=_number("backoff.delay", value.get("delay", 0))),
        multiplier=2 if kind == "exponential" else 1,
        maximum=MAX_DELAY,
        jitter=_number("backoff.jitter", value.get("jitter", 0)),
    )


def _retention(option: str, opts: Mapping[str, object], default: Retention | None) -> Retention | None:
    value = opts.get(option)
    if value is None:
        return default
    if value is True:
        return DROP
    if value is False:
        return timedelta(days=36_500)
    if isinstance(value, Mapping) and set(value) == {"age"}:
        return timedelta(seconds=_number(f"{option}.age", value["age"]))
    raise ValueError(f"job option {option!r} must be a bool or {{'age': seconds}}, not {value!r}")
