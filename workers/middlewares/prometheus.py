"""Attempts as a Prometheus histogram, jobs as counters, and queues as gauges; needs the extra `metrics`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from workers.errors import StorageError, StorageUnavailable
from workers.jobs import JobState
from workers.middlewares.metrics import JobMeter
from workers.middlewares.outcome import Outcome
from workers.queue import Queue

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

WAITS: Final = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 3_600, 14_400, 86_400)
LOOKED_AT: Final = 10_000


class PrometheusMetrics:
    """The histogram `workers_attempt_seconds` by name and outcome; its `_count` is the number of attempts.

    One object serves all workers of a process, because a registry (default: the client library's own) takes each metric
    name once. Every job name makes a series, so a worker with a catch-all should not let strangers choose names.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY, *, buckets: Sequence[float] = SECONDS) -> None:
        self._seconds = Histogram(
            "workers_attempt_seconds",
            "How long attempts took.",
            ["name", "outcome"],
            buckets=buckets,
            registry=registry,
        )

    def observe(self, name: str, outcome: Outcome, seconds: float) -> None:
        """See `Metrics.observe`."""
        self._seconds.labels(name, outcome.value).observe(seconds)


class JobCounters(JobMeter):
    """Jobs by queue and name, see `JobMeter`; every job name makes series, as with `PrometheusMetrics`.

    The counters `workers_jobs_enqueued_total`, `workers_jobs_claimed_total`, `workers_jobs_ended_total` (by outcome,
    too) and `workers_leases_lost_total`, and the histogram `workers_job_wait_seconds`.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY, *, buckets: Sequence[float] = WAITS) -> None:
        labels = ("queue", "name")
        self._enqueued = Counter("workers_jobs_enqueued", "Jobs enqueued.", labels, registry=registry)
        self._claimed = Counter("workers_jobs_claimed", "Attempts begun.", labels, registry=registry)
        self._ended = Counter("workers_jobs_ended", "Jobs that are over.", (*labels, "outcome"), registry=registry)
        self._lost = Counter("workers_leases_lost", "Leases lost.", labels, registry=registry)
        tells = "How long after its enqueue a job was first claimed."
        self._waited = Histogram("workers_job_wait_seconds", tells, labels, buckets=buckets, registry=registry)

    def enqueued(self, queue: str, name: str, jobs: int) -> None:
        self._enqueued.labels(queue, name).inc(jobs)

    def claimed(self, queue: str, name: str, waited: float | None) -> None:
        self._claimed.labels(queue, name).inc()
        if waited is not None:
            self._waited.labels(queue, name).observe(waited)

    def ended(self, queue: str, name: str, outcome: Outcome, jobs: int) -> None:
        self._ended.labels(queue, name, outcome.value).inc(jobs)

    def lost(self, queue: str, name: str) -> None:
        self._lost.labels(queue, name).inc()


class QueueGauges:
    """The gauges `workers_jobs` by queue and state, `workers_oldest_waiting_seconds` by queue, and what limits hold.

    The second is how long the queued job has waited that has waited longest, 0 if none is queued.
    `workers_jobs_held_back` says by queue and limit how many of the first 10 000 queued jobs it keeps back. They are as
    old as the last `update`; `run` updates them every `interval`. One object serves all `queues` of a process; of
    several processes that share the queues, one is enough.
    """

    def __init__(
        self,
        *queues: Queue,
        registry: CollectorRegistry = REGISTRY,
        interval: timedelta = timedelta(seconds=15),
    ) -> None:
        self._queues = queues
        self._interval = interval.total_seconds()
        self._jobs = Gauge("workers_jobs", "Jobs by state.", ["queue", "state"], registry=registry)
        self._oldest = Gauge(
            "workers_oldest_waiting_seconds",
            "How long the queued job has waited that has waited longest.",
            ["queue"],
            registry=registry,
        )
        tells = "Queued jobs that a limit keeps back."
        self._held = Gauge("workers_jobs_held_back", tells, ["queue", "limit"], registry=registry)
        self._limits: dict[str, set[str]] = {}

    async def run(self) -> None:
        """Update until cancelled; of a queue whose storage does not answer there are no numbers meanwhile."""
        while True:
            await self.update()
            await asyncio.sleep(self._interval)

    async def update(self) -> None:
        """Look at the queues now."""
        for queue in self._queues:
            try:
                await self._update(queue)
            except (StorageUnavailable, StorageError):
                self._forget(queue.storage.queue)

    async def _update(self, queue: Queue) -> None:
        counts, since = await queue.counts(), await queue.waiting_since()
        for state, count in counts.items():
            self._jobs.labels(queue.storage.queue, state.value).set(count)
        age = 0.0 if since is None else max(0.0, (datetime.now(UTC) - since).total_seconds())
        self._oldest.labels(queue.storage.queue).set(age)
        await self._update_held(queue)

    async def _update_held(self, queue: Queue) -> None:
        name = queue.storage.queue
        limits, held = await queue.manage.limits(), (await queue.manage.throttled(most=LOOKED_AT)).by_limit
        self._forget_limits(name)
        self._limits[name] = set(limits)
        for limit in limits:
            self._held.labels(name, limit).set(held.get(limit, 0))

    def _forget(self, name: str) -> None:
        for state in JobState:
            self._jobs.remove(name, state.value)
        self._oldest.remove(name)
        self._forget_limits(name)

    def _forget_limits(self, name: str) -> None:
        for limit in self._limits.pop(name, ()):
            self._held.remove(name, limit)
