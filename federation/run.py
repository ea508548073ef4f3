"""A process of ours, from its start to its orderly end."""

from __future__ import annotations

import asyncio
import signal
import socket
from typing import Final, Protocol

import structlog

from federation.app import Federation
from federation.errors import ConfigurationError
from federation.settings import Settings
from federation.worker_pair import FederationWorkers

log = structlog.get_logger(__name__)

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Part(Protocol):
    """Something that runs until asked to stop; a second request skips its grace."""

    def request_stop(self) -> None: ...


async def run(settings: Settings, *, workers: bool, node: bool) -> None:
    """Deliver, serve, or both, until SIGTERM or SIGINT; a second signal skips the grace.

    Raises:
        ConfigurationError: a setting is missing, or the port is taken.
        ExceptionGroup: what ended a part before it was asked to stop.
    """
    federation = Federation(settings)
    parts: list[Part] = []

    def stop() -> None:
        log.info("stopping", again="send the signal again to skip the grace")
        for part in parts:
            part.request_stop()

    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
    try:
        async with asyncio.TaskGroup() as group:
            if node:
                listener = _listen(settings)
                from federation.node.server import NodeServer  # here, because only this needs the `node` extra

                server = NodeServer(federation.node_app(), grace=settings.federation_grace)
                parts.append(server)
                group.create_task(server.serve(sockets=[listener]), name="node")
                log.info("node_serving", url=settings.better_auth_url, port=settings.federation_port)
            if workers:
                federation_workers = FederationWorkers(federation)
                federation_workers.start()
                parts.append(federation_workers)
                group.create_task(federation_workers.wait(), name="workers")
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
        await federation.close()
    log.info("stopped")


def _listen(settings: Settings) -> socket.socket:
    address = (settings.federation_bind, settings.federation_port)
    try:
        return socket.create_server(address, backlog=1024)
    except OSError as error:
        raise ConfigurationError(
            [f"FEDERATION_BIND, FEDERATION_PORT: cannot listen on {address[0]}:{address[1]}: {error.strerror}"]
        ) from error
