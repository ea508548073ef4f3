"""Attempts as a Prometheus histogram; needs the extra `metrics`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry, Histogram

from workers.middlewares.outcome import Outcome

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
