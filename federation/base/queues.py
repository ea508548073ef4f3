"""The queues: their names, what their jobs hold, and how they are opened on whatever storage is configured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Final, Self

from pydantic import AliasGenerator, BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from db.url import parse_url
from federation.base.errors import ConfigurationError
from federation.base.setting_types import plain
from federation.base.settings import Settings
from federation.protocol.models import MAX_PAYLOAD_BYTES
from workers.bounds import MAX_DELAY
from workers.jobs import DROP, Retention
from workers.queue import Queue
from workers.retry import RetryPolicy
from workers.specs import DEFAULT_NAME, Enqueued, JobSpec
from workers.storage import open_storage as storage_from_url
from workers.storage.base import Storage

if TYPE_CHECKING:
    import bullmq
    import redis.asyncio

DELIVERY_QUEUE_NAME: Final = "federation-delivery"
HEALTH_CHECK_QUEUE_NAME: Final = "federation-health-check"
DISCOVERY_QUEUE_NAME: Final = "federation-discovery"
TASKS_QUEUE_NAME: Final = "federation-tasks"
QUEUE_NAMES: Final = (DELIVERY_QUEUE_NAME, HEALTH_CHECK_QUEUE_NAME, DISCOVERY_QUEUE_NAME, TASKS_QUEUE_NAME)

FOLLOW_JOB: Final = "deliver-follow"
UNFOLLOW_JOB: Final = "deliver-unfollow"
POST_JOB: Final = "deliver-post"
HEALTH_CHECK_JOB: Final = "health-check"
DISCOVERY_JOB: Final = "discover"

KEEP_COMPLETED: Final = timedelta(hours=24)
KEEP_FAILED: Final = timedelta(days=7)
KEEP_DISCOVERED: Final = timedelta(seconds=5)
KEEP_TASKS: Final = timedelta(hours=24)
BULL_SCHEMES: Final = ("bull+redis://", "bull+rediss://")
MAX_NUMBER: Final = 2**53
"""The largest number BullMQ's scripts count exactly to."""


class _JobData(BaseModel):
    """Job data is camelCase in the queue, where other implementations read it, and either spelling in Python."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="ignore",
        populate_by_name=True,
        alias_generator=AliasGenerator(alias=to_camel),
        hide_input_in_errors=True,
    )

    def to_wire(self) -> dict[str, object]:
        """The data as it lies in the queue."""
        return self.model_dump(by_alias=True)


class FederationDeliveryJob(_JobData):
    """One delivery: the row it belongs to, where it goes, and its payload, a JSON text, or what refers to it.

    Jobs of Node producers carry the text. Ours carry `payload_id`: the row's own id where the row has the text, else
    that of a `delivery_payloads` row.
    """

    delivery_job_id: Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\x00]*$")]
    target_url: Annotated[str, Field(max_length=2048)]
    server_url: Annotated[str, Field(max_length=2048, pattern=r"^[^\x00]*$")]
    payload: Annotated[str, Field(repr=False, max_length=MAX_PAYLOAD_BYTES)]
    payload_id: Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\x00]*$")] | None = None

    @model_validator(mode="after")
    def _has_one_text(self) -> Self:
        if self.payload and self.payload_id:
            raise ValueError("payload must be empty beside payloadId")
        return self

    def to_wire(self) -> dict[str, object]:
        """The data as it lies in the queue; without `payloadId` where the text is inline, as Node writes it."""
        return self.model_dump(by_alias=True, exclude=None if self.payload_id else {"payload_id"})


class HealthCheckJob(_JobData):
    """One probe of one server."""

    server_url: Annotated[str, Field(max_length=2048, pattern=r"^[^\x00]*$")]


class DiscoveryJob(_JobData):
    """One unknown server."""

    server_url: Annotated[str, Field(max_length=2048, pattern=r"^[^\x00]*$")]


class BullQueue(Queue):
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
        """A job with this queue's defaults, changed by BullMQ's options.

        Known options: `jobId`, `delay` (ms), `attempts`, `backoff` (ms, or `{type, delay, jitter}` with type `fixed` or
        `exponential`), `priority`, `removeOnComplete`, `removeOnFail` (a bool, or `{age}` in seconds).

        Raises:
            ValueError: an unknown option, or a value BullMQ would not take; says which.
        """
        return _with_options(self._defaults, name or DEFAULT_NAME, data, opts or {})

    async def add(self, name: str, data: object, opts: Mapping[str, object] | None = None) -> Enqueued:
        """One job is in the queue; see `spec` and `Queue.enqueue`. Repeating it with the same `jobId` adds nothing."""
        return (await self.add_bulk([(name, data, opts)]))[0]

    async def add_bulk(
        self, jobs: Sequence[tuple[str, object, Mapping[str, object] | None]], *, connection: object | None = None
    ) -> list[Enqueued]:
        """As `add`, for many jobs in one round trip; `connection` joins the caller's SQL transaction."""
        return await self.enqueue_many([self.spec(*job) for job in jobs], connection=connection)

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

            self._raw = bullmq.Queue(self.storage.queue, {"connection": self._redis_url, "prefix": self._prefix})
        return self._raw

    async def stop(self) -> None:
        await super().stop()
        if self._raw is not None:
            await self._raw.close()
            self._raw = None


def delivery_queue(settings: Settings, storage: Storage) -> BullQueue:
    """The delivery queue: 5 attempts, 5, 10, 20, 40 s apart without jitter; completed kept 24 h, failed 7 days."""
    return BullQueue(
        storage,
        max_attempts=settings.federation_delivery_attempts,
        backoff=delivery_backoff(settings),
        keep_completed=KEEP_COMPLETED,
        keep_failed=KEEP_FAILED,
        redis_url=bullmq_url(settings),
        prefix=settings.federation_queue_prefix,
    )


def health_check_queue(settings: Settings, storage: Storage) -> BullQueue:
    """The health-check queue, without defaults: one attempt a job, kept an hour unless it says otherwise."""
    return BullQueue(storage, redis_url=bullmq_url(settings), prefix=settings.federation_queue_prefix)


def discovery_queue(storage: Storage) -> Queue:
    """The discovery queue: one attempt a job, for the delivery that asks is itself tried again; kept 5 s."""
    return Queue(storage, max_attempts=1, result_ttl=KEEP_DISCOVERED)


def tasks_queue(storage: Storage) -> Queue:
    """The queue of the application's own tasks: 3 attempts unless a task says otherwise, kept 24 h."""
    return Queue(storage, result_ttl=KEEP_TASKS)


def delivery_backoff(settings: Settings) -> RetryPolicy:
    """The pause between two attempts at a delivery: doubling, without jitter."""
    return RetryPolicy(initial=settings.federation_delivery_backoff, maximum=MAX_DELAY, jitter=0)


def bullmq_url(settings: Settings) -> str | None:
    """The Redis the BullMQ queues live on, None if they live elsewhere."""
    chosen = plain(settings.queue_url)
    if chosen is None:
        return plain(settings.redis_url)
    scheme = chosen.partition("://")[0]
    return chosen.removeprefix("bullmq+") if scheme in ("bullmq+redis", "bullmq+rediss") else None


def keyless_redis_url(settings: Settings) -> str | None:
    """The Redis of BullMQ's or Bull's queues, which keep no deduplication keys; None if the queues live elsewhere."""
    chosen = plain(settings.queue_url) or ""
    if not chosen.startswith(BULL_SCHEMES):
        return bullmq_url(settings)
    from workers.storage.bull import server_url

    return server_url(chosen)


def open_storage(settings: Settings, queue: str, *, client: redis.asyncio.Redis | None = None) -> Storage:
    """The storage of one queue: where QUEUE_URL says; unset, BullMQ on REDIS_URL; else the application's own database.

    `client` is used for BullMQ instead of a connection of its own.
    """
    redis_url = bullmq_url(settings)
    if redis_url is not None:
        from workers.storage.bullmq import BullMQStorage

        return BullMQStorage(client or redis_url, queue, prefix=settings.federation_queue_prefix)
    url = (settings.queue_url or settings.database_url).get_secret_value()
    if url.startswith(BULL_SCHEMES):
        from workers.storage.bull import BullStorage

        return BullStorage(url, queue, prefix=settings.federation_queue_prefix)
    if url.startswith(("redis://", "rediss://")):
        from workers.storage.redis import RedisStorage

        return RedisStorage(url, queue, prefix=settings.federation_queue_prefix)
    if url.startswith("file:"):
        return storage_from_url(url, queue=queue)
    from workers.storage.sql import SqlStorage

    return SqlStorage(parse_url(url), queue)


_OPTIONS: Final = frozenset({"jobId", "delay", "attempts", "backoff", "priority", "removeOnComplete", "removeOnFail"})


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
