"""The queues: their names, how often their jobs are tried, how long ended jobs are kept; the options of BullMQ's `add`.

What every storage can keep of the options becomes a part of the job. The rest goes to the storage in BullMQ's own
words: one on the layout of Node's libraries takes what it knows, any other refuses it by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from federation.base.errors import ConfigurationError
from federation.base.queues.redis import bullmq_connection
from federation.base.queues.storages import bullmq_url
from federation.base.settings.settings import Settings
from workers import QueueOptions
from workers.checks import MAX_DELAY
from workers.deduplication import Deduplication, DeduplicationMode
from workers.errors import Unsupported
from workers.jobs import DROP, NewJob, Retention
from workers.metadata import check_meta
from workers.queue import Queue
from workers.retry import RetryPolicy
from workers.specs import DEFAULT_NAME, Enqueued, JobSpec
from workers.storage.abilities import TakesNodeOptions
from workers.storage.base import Storage

if TYPE_CHECKING:
    import bullmq

MAX_NUMBER: Final = 2**53
"""The largest number up to which BullMQ's scripts count exactly."""
FOREVER: Final = timedelta(days=36_500)

COMMON: Final = frozenset(
    ("jobId", "delay", "attempts", "backoff", "priority", "removeOnComplete", "removeOnFail", "sizeLimit", "meta")
)
"""Options that every storage can keep, in most of their forms; `meta` is that of a `JobSpec`, and not BullMQ's."""
FLAGS: Final = frozenset(
    (
        *("lifo", "failParentOnFailure", "continueParentOnFailure"),
        *("ignoreDependencyOnFailure", "removeDependencyOnFailure"),
    )
)
OF_NODE: Final = FLAGS | {
    *("timestamp", "keepLogs", "stackTraceLimit", "deduplication", "debounce", "parent", "telemetry")
}
OF_SCHEDULES: Final = frozenset(("repeat", "repeatJobKey", "prevMillis"))
"""Options by which BullMQ's own job schedulers add their runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJobSpec(JobSpec):
    """A job with options in BullMQ's words: what no other part of it says. `size_limit` is in bytes."""

    node_options: Mapping[str, object] = field(default_factory=dict)
    size_limit: float | None = None


def spec_of(defaults: JobSpec, storage: Storage, name: str, data: object, opts: Mapping[str, object]) -> NodeJobSpec:
    """Return the job; what `opts` does not say is as in `defaults`.

    Raises:
        ValueError: an unknown option, or a value that BullMQ would not accept.
        Unsupported: an option that this storage cannot keep.
    """
    _check_known(opts)
    others = {option: opts[option] for option in OF_NODE & opts.keys() if _says_something(option, opts[option])}
    backoff, kept_backoff = _backoff(opts["backoff"]) if "backoff" in opts else (defaults.backoff, None)
    completed, kept_completed = _retention("removeOnComplete", opts, defaults.keep_completed)
    failed, kept_failed = _retention("removeOnFail", opts, defaults.keep_failed)
    said = {"backoff": kept_backoff, "removeOnComplete": kept_completed, "removeOnFail": kept_failed}
    others |= {option: value for option, value in said.items() if value is not None}
    deduplication = None
    if not isinstance(storage, TakesNodeOptions):
        deduplication = _deduplication(others.pop("deduplication", others.pop("debounce", None)))
        if others:
            raise Unsupported(f"job options {sorted(others)} cannot be kept by {type(storage).__name__}, but by BullMQ")
    return NodeJobSpec(
        payload=data,
        name=name,
        id=_job_id(opts.get("jobId")),
        delay=timedelta(milliseconds=_number("delay", opts.get("delay", 0))),
        max_attempts=int(_number("attempts", opts["attempts"])) or 1 if "attempts" in opts else None,
        priority=int(_number("priority", opts.get("priority", 0))),
        backoff=backoff,
        keep_completed=completed,
        keep_failed=failed,
        deduplication=deduplication,
        meta=check_meta(opts["meta"]) if "meta" in opts else None,
        node_options=others,
        size_limit=_number("sizeLimit", opts["sizeLimit"]) if opts.get("sizeLimit") else None,
    )


def _check_known(opts: Mapping[str, object]) -> None:
    scheduled = OF_SCHEDULES & opts.keys()
    if scheduled:
        raise ValueError(f"job options {sorted(scheduled)} are BullMQ's own; use `raw` to make a job scheduler")
    unknown = opts.keys() - COMMON - OF_NODE
    if unknown:
        raise ValueError(f"job options {sorted(unknown)} are not BullMQ's; those are {sorted(COMMON | OF_NODE)}")


def _says_something(option: str, value: object) -> bool:
    if option in FLAGS and value is not None and not isinstance(value, bool):
        raise ValueError(f"job option {option!r} must be a bool, not {value!r}")
    return value is not None and value is not False


def _job_id(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"job option 'jobId' must be a text, not {value!r}")
    return value


def _number(option: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_NUMBER:
        raise ValueError(f"job option {option!r} must be a number from 0 to {MAX_NUMBER}, not {value!r}")
    return value


def _backoff(value: object) -> tuple[RetryPolicy | None, object]:
    """Return the policy of a built-in strategy, or else what the storage is to write."""
    if not isinstance(value, Mapping):
        return _exactly(_number("backoff", value), 1, 0), None
    kind = value.get("type")
    if not isinstance(kind, str) or not kind:
        raise ValueError(f"job option 'backoff' must have a type, not {kind!r}")
    delay = _number("backoff.delay", value.get("delay", 0))
    jitter = _number("backoff.jitter", value.get("jitter", 0))
    if kind not in ("fixed", "exponential"):
        return None, {"type": kind, "delay": delay, **({"jitter": jitter} if jitter else {})}
    return _exactly(delay, 2 if kind == "exponential" else 1, jitter), None


def _exactly(delay: float, multiplier: float, jitter: float) -> RetryPolicy:
    initial = timedelta(milliseconds=delay)
    return RetryPolicy(initial=initial, multiplier=multiplier, maximum=MAX_DELAY, jitter=jitter)


def _retention(option: str, opts: Mapping[str, object], default: Retention | None) -> tuple[Retention | None, object]:
    """Return how long the record stays, and what the storage is to write if a time alone does not say it."""
    value = opts.get(option)
    if value is None:
        return default, None
    if isinstance(value, bool):
        return (DROP if value else FOREVER), None
    if isinstance(value, Mapping):
        return _limits(option, value)
    count = _number(option, value)
    return (FOREVER, int(count)) if count else (DROP, None)


def _limits(option: str, value: Mapping[str, object]) -> tuple[Retention, object]:
    if not value or value.keys() - {"age", "count", "limit"}:
        raise ValueError(f"job option {option!r} has age, count and limit, not {sorted(value)}")
    limits = {name: _number(f"{option}.{name}", number) for name, number in value.items()}
    keep = timedelta(seconds=limits["age"]) if "age" in limits else FOREVER
    if limits.get("count") == 0:
        return DROP, None
    return keep, None if limits.keys() == {"age"} else limits


def _deduplication(value: object) -> Deduplication | None:
    """Return what the storages that keep deduplication keys themselves make of BullMQ's option."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not isinstance(key := value.get("id"), str):
        raise ValueError(f"job option 'deduplication' must have an id, not {value!r}")
    modes = frozenset(name for name in ("extend", "replace", "keepLastIfActive") if value.get(name))
    ttl = timedelta(milliseconds=_number("deduplication.ttl", value.get("ttl") or 0))
    if not modes:
        mode = DeduplicationMode.THROTTLE if ttl else DeduplicationMode.SIMPLE
        return Deduplication(key=key, mode=mode, ttl=ttl or None)
    if modes == {"extend", "replace"} and ttl:
        return Deduplication(key=key, mode=DeduplicationMode.DEBOUNCE, ttl=ttl)
    raise Unsupported(f"job option 'deduplication' with {sorted(modes)} cannot be kept by this storage, but by BullMQ")


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
        """Return a job with this queue's defaults, changed by BullMQ's options, all of which are known.

        On every storage: `jobId`, `delay` (ms), `attempts`, `backoff` (ms, or `{type, delay, jitter}` with type `fixed`
        or `exponential`), `priority`, `sizeLimit` (bytes), `removeOnComplete`, `removeOnFail` (a bool, or `{age}` in
        seconds), `meta` (see `JobSpec`), and `deduplication` where the storage keeps keys. On BullMQ also: other types
        of `backoff`, how many records to keep, all modes of `deduplication`, `lifo` (on Bull too), `timestamp`,
        `keepLogs`, `stackTraceLimit`, `telemetry`, `parent` and what a failure means to it. The id of a `parent` is
        that in Redis.

        Raises:
            ValueError: an unknown option, or a value that BullMQ would not accept; the message says which.
            Unsupported: an option that this storage cannot keep, which the message names.
        """
        return spec_of(self._defaults, self.storage, name or DEFAULT_NAME, data, opts or {})

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

    def _new_job(self, spec: JobSpec) -> NewJob:
        job = super()._new_job(spec)
        if not isinstance(spec, NodeJobSpec):
            return job
        if spec.size_limit is not None and len(job.payload) > spec.size_limit:
            raise ValueError(f"job option 'sizeLimit' is {spec.size_limit:.0f} bytes, and the data {len(job.payload)}")
        if not spec.node_options or not isinstance(self.storage, TakesNodeOptions):
            return job
        return self.storage.with_node_options(job, spec.node_options)

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


DELIVERY_QUEUE_NAME: Final = "federation-delivery"
HEALTH_CHECK_QUEUE_NAME: Final = "federation-health-check"
DISCOVERY_QUEUE_NAME: Final = "federation-discovery"
TASKS_QUEUE_NAME: Final = "federation-tasks"
ACTIVITIES_QUEUE_NAME: Final = "federation-activities"
"""Jobs by ActivityPub: Node's workers, which may be on the delivery queue, do not know them."""
QUEUE_NAMES: Final = (DELIVERY_QUEUE_NAME, HEALTH_CHECK_QUEUE_NAME, DISCOVERY_QUEUE_NAME, TASKS_QUEUE_NAME)

KEEP_COMPLETED: Final = timedelta(hours=24)
KEEP_FAILED: Final = timedelta(days=7)
KEEP_DISCOVERED: Final = timedelta(seconds=5)
KEEP_TASKS: Final = timedelta(hours=24)


def queue_names(settings: Settings) -> tuple[str, ...]:
    """Return the names of the queues that a node with these settings has."""
    return (*QUEUE_NAMES, ACTIVITIES_QUEUE_NAME) if settings.federation_activitypub else QUEUE_NAMES


def delivery_queue(settings: Settings, storage: Storage, *, make: Callable[..., JobQueue] = JobQueue) -> JobQueue:
    """Make a queue of deliveries: `FEDERATION_DELIVERY_ATTEMPTS` (5), `FEDERATION_DELIVERY_BACKOFF` (5 s) apart, then
    twice as long each time, without jitter.

    Completed jobs are kept 24 h, failed ones 7 days.
    """
    return make(
        storage,
        max_attempts=settings.federation_delivery_attempts,
        backoff=delivery_backoff(settings),
        keep_completed=KEEP_COMPLETED,
        keep_failed=KEEP_FAILED,
        redis_url=bullmq_url(settings),
        prefix=settings.federation_queue_prefix,
    )


def health_check_queue(settings: Settings, storage: Storage) -> JobQueue:
    """Make the health-check queue, without defaults: one attempt per job, kept an hour unless it says otherwise."""
    return JobQueue(storage, redis_url=bullmq_url(settings), prefix=settings.federation_queue_prefix)


def discovery_queue(storage: Storage) -> Queue:
    """Make the discovery queue: one attempt per job, as the asking delivery is itself tried again; jobs kept 5 s."""
    return Queue(storage, max_attempts=1, result_ttl=KEEP_DISCOVERED, options=QueueOptions(keep_failed=KEEP_DISCOVERED))


def tasks_queue(storage: Storage) -> Queue:
    """Make the queue of the application's own tasks: 3 attempts unless a task says otherwise.

    Completed jobs are kept 24 h, failed ones 7 days.
    """
    return Queue(storage, result_ttl=KEEP_TASKS, options=QueueOptions(keep_failed=KEEP_FAILED))


def delivery_backoff(settings: Settings) -> RetryPolicy:
    """Return the pauses between attempts at a delivery: doubling, without jitter."""
    return RetryPolicy(initial=settings.federation_delivery_backoff, maximum=MAX_DELAY, jitter=0)


def longest_delivery_pause(settings: Settings) -> timedelta:
    """Return how long the last pause between two attempts at a delivery is."""
    return delivery_backoff(settings).delay(settings.federation_delivery_attempts)
