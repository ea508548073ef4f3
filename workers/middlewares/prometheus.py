"""Attempts as a Prometheus histogram, and queues as gauges; needs the extra `metrics`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry, Gauge, Histogram

from workers.errors import StorageError, StorageUnavailable
from workers.jobs import JobState
from workers.middlewares.outcome import Outcome
from workers.queue import Queue

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


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


class QueueGauges:
    """The gauges `workers_jobs` by queue and state, and `workers_oldest_waiting_seconds` by queue.

    The latter is how long the queued job has waited that has waited longest, 0 if none is queued. They are as old as
    the last `update`; `run` updates them every `interval`. One object serves all `queues` of a process; of several
    processes that share the queues, one is enough.
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

    def _forget(self, name: str) -> None:
        for state in JobState:
            self._jobs.remove(name, state.value)
        self._oldest.remove(name)
