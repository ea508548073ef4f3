"""Watching a process: its metrics port, and the gauges of its queues and its database.

The gauges are refreshed regularly, whether or not anybody reads them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, Protocol

import structlog
from sqlalchemy.exc import SQLAlchemyError

from db import Database
from federation.base.errors import ConfigurationError
from federation.monitoring.endpoints import Endpoints
from federation.monitoring.numbers import DatabaseNumbers, read_numbers
from federation.monitoring.readiness import Readiness
from workers import JobState, Queue, WorkersError
from workers.supervisor.http_port import HttpPort

if TYPE_CHECKING:
    from federation.monitoring.prometheus import ProcessMetrics

log = structlog.get_logger(__name__)


class MetricsListener(HttpPort):
    """An `HttpPort` that the option `--metrics-port` opens."""

    async def start(self, address: str, port: int) -> None:
        """Open the port.

        Raises:
            ConfigurationError: the port is taken, or the address is not this machine's.
        """
        try:
            await super().start(address, port)
        except OSError as error:
            raise ConfigurationError([port_problem(address, port, error)]) from error
        log.info("metrics_serving", address=address, port=port)


def port_problem(address: str, port: int, error: OSError) -> str:
    """Say which settings chose the port that cannot be opened."""
    return f"--metrics-port, FEDERATION_METRICS_BIND: cannot listen on {address}:{port}: {error.strerror}"


INTERVAL: Final = timedelta(seconds=15)
JITTER: Final = 0.1
TIMEOUT: Final = timedelta(seconds=10)
LOOKED_AT: Final = 200
"""How many queued jobs are searched for the oldest: a storage lists them in no guaranteed order."""


class Gauges(Protocol):
    """The receiver of the numbers."""

    def set_queue(self, queue: str, counts: Mapping[JobState, int], *, oldest_seconds: float, at: datetime) -> None: ...
    def set_database(self, numbers: DatabaseNumbers, *, at: datetime) -> None: ...


@asynccontextmanager
async def monitored(
    metrics: ProcessMetrics | None,
    *,
    readiness: Readiness,
    database: Database,
    queues: Sequence[Queue],
    recurring: Collection[str],
    address: str,
    port: int | None,
) -> AsyncIterator[None]:
    """Refresh the gauges of `queues`, `database` and the `recurring` jobs of these names while the block runs.

    With a `port`, serve everything on it. Without `metrics` nothing happens.

    Raises:
        ConfigurationError: the port is taken.
    """
    if metrics is None:
        yield
        return
    listener = MetricsListener(Endpoints(readiness, metrics))
    if port is not None:
        await listener.start(address, port)
    watching = asyncio.create_task(watch(metrics, database, queues, recurring), name="watch")
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait([watching])
        await listener.close()


async def watch(gauges: Gauges, database: Database, queues: Sequence[Queue], recurring: Collection[str]) -> None:
    """Refresh the gauges every 15 s until cancelled. An outage is logged and leaves the last numbers."""
    while True:
        for queue in queues:
            try:
                async with asyncio.timeout(TIMEOUT.total_seconds()):
                    await _refresh_queue(gauges, queue)
            except (WorkersError, TimeoutError) as error:
                log.warning("queue_depth_unknown", queue=queue.storage.queue, error=type(error).__name__)
        try:
            async with asyncio.timeout(TIMEOUT.total_seconds()):
                gauges.set_database(await read_numbers(database, recurring=recurring), at=datetime.now(UTC))
        except (SQLAlchemyError, OSError) as error:  # a TimeoutError is an OSError, too
            log.warning("database_numbers_unknown", error=type(error).__name__)
        await asyncio.sleep(INTERVAL.total_seconds() * random.uniform(1 - JITTER, 1 + JITTER))  # noqa: S311 - spreads load, guards nothing


async def _refresh_queue(gauges: Gauges, queue: Queue) -> None:
    counts = await queue.counts()
    oldest = await _oldest_ready(queue) if counts[JobState.QUEUED] else None
    now = datetime.now(UTC)
    age = 0.0 if oldest is None else max((now - oldest).total_seconds(), 0.0)
    gauges.set_queue(queue.storage.queue, counts, oldest_seconds=age, at=now)


async def _oldest_ready(queue: Queue) -> datetime | None:
    page = await queue.manage.list(JobState.QUEUED, limit=LOOKED_AT)
    return min((job.next_run_at or job.created_at for job in page.jobs), default=None)
