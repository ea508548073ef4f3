"""One post to very many servers, half of which are down."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from bench.deliveries import node_environment
from bench.fan_out import fan_out
from bench.outage.figure import Figure


def measure(queue: str, *, recipients: int, repeat: int) -> Iterator[Figure]:
    """Measure a fan-out, and check that no held delivery has a job.

    `redis_mb` is shown beside that of a fan-out to the other half only.
    """
    runs, alone = [], []
    for _ in range(repeat):
        with node_environment(queue) as environment:
            runs.append(fan_out(environment, recipients, down=recipients // 2))
        with node_environment(queue) as environment:
            alone.append(fan_out(environment, recipients - recipients // 2))
    seconds = statistics.median(run["enqueue_s"] for run in runs)
    used, half = (statistics.median(run["redis_mb"] for run in each) for each in (runs, alone))
    labels: dict[str, object] = {"queue": queue, "servers": recipients, "down": recipients // 2}
    yield Figure(
        name="seconds to owe a post of 2.4 KB",
        labels=labels,
        value=seconds,
        bar=10,
        has_to_be="at most",
        details={"cpu_s": statistics.median(run["cpu_s"] for run in runs)},
    )
    if half:
        yield Figure(
            name="queue memory of the half that is down, MB",
            labels=labels,
            value=max(used - half, 0),
            bar=half / 100,  # by this much used_memory differs from run to run
            has_to_be="at most",
            details={"redis_mb": used, "without_redis_mb": half},
        )
