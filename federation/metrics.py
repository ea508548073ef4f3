"""What a delivering process tells Prometheus; `federation workers run --metrics-port 9464` serves it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from threading import Thread
from typing import Final
from wsgiref.simple_server import WSGIServer

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from federation.errors import ConfigurationError
from workers import Queue, WorkerEvent, WorkersError

log = structlog.get_logger(__name__)

DEPTH_INTERVAL: Final = timedelta(seconds=15)
# From a quick acknowledgment to the delivery deadline.
SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 30)


class WorkerMetrics:
    """An observer of workers that counts their events; `watch` adds how many jobs wait in which state."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._events = Counter(
            "federation_worker_events", "Events of workers by kind.", ["queue", "kind"], registry=self.registry
        )
        self._seconds = Histogram(
            "federation_attempt_seconds",
            "How long attempts took.",
            ["queue", "outcome"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self._jobs = Gauge("federation_jobs", "Jobs by state.", ["queue", "state"], registry=self.registry)
        self._server: WSGIServer | None = None
        self._thread: Thread | None = None

    def __call__(self, event: WorkerEvent) -> None:
        self._events.labels(event.queue, event.kind.value).inc()
        if event.duration is not None:
            self._seconds.labels(event.queue, event.kind.value).observe(event.duration.total_seconds())

    def serve(self, port: int, *, address: str = "127.0.0.1") -> None:
        """`/metrics` is served on `port`, by a thread of its own, until `close`.

        Raises:
            ConfigurationError: the port is taken.
        """
        try:
            self._server, self._thread = start_http_server(port, addr=address, registry=self.registry)
        except OSError as error:
            raise ConfigurationError(
                [f"--metrics-port: cannot listen on {address}:{port}: {error.strerror}"]
            ) from error
        log.info("metrics_serving", address=address, port=port)

    def close(self) -> None:
        """The port is free again."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    async def watch(self, queues: Sequence[Queue]) -> None:
        """The number of jobs in each state is refreshed every 15 s until cancelled; an outage leaves the last one."""
        while True:
            for queue in queues:
                name = queue.storage.queue
                try:
                    counts = await queue.counts()
                except WorkersError as error:
                    log.warning("queue_depth_unknown", queue=name, error=type(error).__name__)
                    continue
                for state, number in counts.items():
                    self._jobs.labels(name, state.value).set(number)
            await asyncio.sleep(DEPTH_INTERVAL.total_seconds())
