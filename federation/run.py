"""One of our processes, from its start to its orderly end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import structlog

from db import Database
from db.engines import POSTGRES_CONNECTIONS
from federation.admin.deliveries.bulk_jobs import INTERVAL, BulkJobs
from federation.base.errors import ConfigurationError, Unreachable
from federation.base.settings.reach import HOST_ADVICE, missing_host_tables, require_schema
from federation.base.settings.settings import Settings
from federation.monitoring.endpoints import Endpoints
from federation.monitoring.monitor import monitored
from federation.runtime.composition import Federation
from federation.runtime.nodes import adopt, release, set_aside_loaded
from federation.runtime.recurring_jobs import recurring_jobs
from federation.runtime.tending import Tick
from federation.runtime.workers import NO_TASKS, FederationWorkers
from federation.tasks import declared_tasks
from workers import Queue
from workers.storage.abilities import Admission, Pooled
from workers.storage.base import Storage
from workers.storage.sql import admission
from workers.supervisor import Introduction, Membership
from workers.worker.events import Observer, WorkerEvent, WorkerEventKind

if TYPE_CHECKING:
    from federation.monitoring.prometheus import ProcessMetrics
    from federation.node.server import NodeServer

log = structlog.get_logger(__name__)

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Part(Protocol):
    """Something that runs until asked to stop; a second request skips its grace."""

    def request_stop(self) -> None: ...


class Beside(Part, Protocol):
    """A part that knows the others only by their node: it serves until asked to stop."""

    async def serve(self) -> None: ...


OpenBeside: TypeAlias = Callable[[Federation], Beside]


async def run(
    settings: Settings,
    *,
    workers: bool,
    node: bool,
    metrics_port: int | None = None,
    membership: Membership | None = None,
    beside: OpenBeside | None = None,
) -> None:
    """Deliver, serve, or both, until SIGTERM or SIGINT; a second signal skips the grace.

    With `metrics_port`, `/metrics`, `/healthz` and `/readyz` are served on that port; by the supervisor, if there is a
    `membership`. What `beside` opens runs as long.

    Raises:
        ConfigurationError: a setting is missing, the database has not been upgraded, the port is taken, or a module of
            tasks cannot be imported.
        ExceptionGroup: what ended a part before it was asked to stop.
    """
    settings.require_files()
    same_address = settings.federation_metrics_bind == settings.federation_bind
    if node and same_address and metrics_port == settings.federation_port:
        raise ConfigurationError(
            [f"--metrics-port: {metrics_port} is FEDERATION_PORT, the node's own port; take another"]
        )
    wants_metrics = metrics_port is not None or (node and settings.federation_metrics_clients)
    metrics = _metrics() if wants_metrics else None
    federation = Federation(settings, metrics=metrics)
    adopt(federation)
    try:
        tasks = declared_tasks(settings.federation_tasks) if workers else NO_TASKS
        try:
            await _require_reach(federation, membership)
        except Unreachable as error:
            if workers or node or beside is None:
                raise
            # its pages say so, too
            log.error("database_away", error=str(error), then="the dashboard shows nothing until it answers")
        if node:
            await _look_at_host(federation)
        served = _node_server(federation) if node else None
        observers: list[Observer] = [metrics] if metrics else []
        if membership is not None:
            observers.append(_Introducing(membership, federation))
        ticks: Mapping[Tick, timedelta] = {BulkJobs(federation).tick: INTERVAL}
        federation_workers = (
            FederationWorkers(federation, tasks=tasks, observers=observers, leads=membership is None, ticks=ticks)
            if workers
            else None
        )
        other = beside(federation) if beside is not None else None
        async with (
            monitored(
                metrics,
                readiness=federation.serving_readiness if node else federation.readiness,
                database=federation.database,
                queues=_watched_queues(federation),
                recurring=[job.name for job in recurring_jobs(federation)],
                address=settings.federation_metrics_bind,
                port=metrics_port if membership is None else None,
            ),
            _joined(membership, Endpoints(federation.readiness, metrics), federation_workers),
        ):
            set_aside_loaded()
            await _until_stopped(settings, served, federation_workers, other)
    finally:
        release()
        await federation.close()
    log.info("stopped")


async def _require_reach(federation: Federation, membership: Membership | None) -> None:
    await require_schema(federation.database)
    if membership is not None:
        await require_connections(federation.database, federation.delivery_queue.storage, processes=membership.of)


async def _until_stopped(
    settings: Settings,
    served: tuple[NodeServer, socket.socket] | None,
    workers: FederationWorkers | None,
    other: Beside | None,
) -> None:
    parts: list[Part | None] = [served[0] if served else None, workers, other]
    with _stopping_on_signals([part for part in parts if part is not None]):
        async with asyncio.TaskGroup() as group:
            if served is not None:
                server, listener = served
                group.create_task(server.serve(sockets=[listener]), name="node")
                log.info("node_serving", url=settings.better_auth_url, port=settings.federation_port)
            if other is not None:
                group.create_task(other.serve(), name="beside")
            if workers is not None:
                workers.start()
                group.create_task(workers.wait(), name="workers")


@asynccontextmanager
async def _joined(
    membership: Membership | None, endpoints: Endpoints, workers: FederationWorkers | None
) -> AsyncIterator[None]:
    """Answer the supervisor, if there is one."""
    if membership is None or workers is None:
        yield
        return
    async with membership.joined(endpoints, lead=workers.lead):
        yield


class _Introducing:
    """Tells the supervisor that this process delivers, once its workers are connected."""

    def __init__(self, membership: Membership, federation: Federation) -> None:
        settings = federation.settings
        self._membership = membership
        self._awaited = {queue.storage.queue for queue in federation.delivery_queues.all}
        self._introduction = Introduction(
            grace_seconds=settings.federation_grace.total_seconds(), bind=settings.federation_metrics_bind
        )

    def __call__(self, event: WorkerEvent) -> None:
        if event.kind is not WorkerEventKind.READY or event.queue not in self._awaited:
            return
        self._awaited.discard(event.queue)
        if not self._awaited:
            self._membership.tell_ready(self._introduction)


async def _look_at_host(federation: Federation) -> None:
    """Log which host tables are missing.

    The process starts all the same: the host application may be migrating right now.
    """
    names = await missing_host_tables(federation.database)
    if names:
        log.error("host_tables_missing", missing=list(names), advice=HOST_ADVICE)


def _metrics() -> ProcessMetrics:
    from federation.monitoring.prometheus import ProcessMetrics  # here: only this needs the extra

    return ProcessMetrics()


def _watched_queues(federation: Federation) -> list[Queue]:
    queues: list[Queue] = [*federation.delivery_queues.all, federation.health_check_queue, federation.discovery_queue]
    if federation.settings.federation_tasks or federation.activitypub is not None:
        queues.append(federation.tasks_queue)
    return queues


@contextmanager
def _stopping_on_signals(parts: Sequence[Part]) -> Iterator[None]:
    def stop() -> None:
        log.info("stopping", again="send the signal again to skip the grace")
        for part in parts:
            part.request_stop()

    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)


def _node_server(federation: Federation) -> tuple[NodeServer, socket.socket]:
    # Imported here, because only this needs the `node` extra.
    from federation.node.clients import Clients, ClientStanding
    from federation.node.server import NodeServer

    settings, standing = federation.settings, ClientStanding()
    clients = Clients(settings.federation_trusted_proxies)
    app = federation.node_app(standing=standing)
    server = NodeServer(app, grace=settings.federation_grace, clients=clients, standing=standing)
    return server, _listen(settings)


def _listen(settings: Settings) -> socket.socket:
    address = (settings.federation_bind, settings.federation_port)
    try:
        return socket.create_server(address, backlog=1024)
    except OSError as error:
        raise ConfigurationError(
            [f"FEDERATION_BIND, FEDERATION_PORT: cannot listen on {address[0]}:{address[1]}: {error.strerror}"]
        ) from error


async def require_connections(database: Database, queue: Storage, *, processes: int) -> None:
    """Check that `processes` can have all connections that their pools may open, to the database and to the queue.

    Other processes, such as the inbound side, are not counted: nobody here knows how many there are.

    Raises:
        ConfigurationError: a server admits fewer; the message has the arithmetic.
        SQLAlchemyError, StorageUnavailable: one did not answer.
    """
    pooled = queue if isinstance(queue, Pooled) and queue.connections else None
    if not database.is_sqlite:
        async with database.read() as session:
            found = await (await session.connection()).run_sync(admission)
        each = POSTGRES_CONNECTIONS + (pooled.connections if pooled is not None else 0)
        _require("DATABASE_URL", found, processes, each)
    elif pooled is not None:
        _require("QUEUE_URL", await pooled.admission(), processes, pooled.connections)


def _require(variable: str, found: Admission, processes: int, each: int) -> None:
    shortage = found.shortage(processes, each=each)
    if shortage is not None:
        raise ConfigurationError([f"--processes {processes}, {variable}: {shortage}"])
