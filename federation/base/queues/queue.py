"""A queue that accepts jobs with the options of BullMQ, on any storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from federation.base.errors import ConfigurationError
from federation.base.queues.options import NodeJobSpec, spec_of
from federation.base.queues.redis import bullmq_connection
from workers.jobs import NewJob, Retention
from workers.queue import Queue
from workers.retry import RetryPolicy
from workers.specs import DEFAULT_NAME, Enqueued, JobSpec
from workers.storage.abilities import TakesNodeOptions
from workers.storage.base import Storage

if TYPE_CHECKING:
    import bullmq


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
        seconds), and `deduplication` where the storage keeps keys. On BullMQ also: other types of `backoff`, how many
        records to keep, all modes of `deduplication`, `lifo` (on Bull too), `timestamp`, `keepLogs`, `stackTraceLimit`,
        `telemetry`, `parent` and what a failure means to it. The id of a `parent` is that in Redis.

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
