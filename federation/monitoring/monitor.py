"""A process while it is watched: its gauges refreshed, its metrics port open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from federation.monitoring.endpoints import Endpoints
from federation.monitoring.listener import MetricsListener
from federation.monitoring.watch import watch

if TYPE_CHECKING:
    from federation.app import Federation
    from federation.monitoring.prometheus import ProcessMetrics
    from workers import Queue


@asynccontextmanager
async def monitored(federation: Federation, metrics: ProcessMetrics | None, *, port: int | None) -> AsyncIterator[None]:
    """While the block runs, the gauges are refreshed, and with a port everything is served on it.

    Raises:
        ConfigurationError: the port is taken.
    """
    if metrics is None:
        yield
        return
    listener = MetricsListener(Endpoints(federation.readiness, metrics))
    if port is not None:
        await listener.start(federation.settings.federation_metrics_bind, port)
    watching = asyncio.create_task(watch(metrics, federation.database, _queues(federation)), name="watch")
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait([watching])
        await listener.close()


def _queues(federation: Federation) -> list[Queue]:
    queues = [federation.delivery_queue, federation.health_check_queue, federation.discovery_queue]
    if federation.settings.federation_tasks:
        queues.append(federation.tasks_queue)
    return queues
