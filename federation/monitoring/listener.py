"""The metrics port of a process."""

from __future__ import annotations

import structlog

from federation.base.errors import ConfigurationError
from workers.supervisor.http_port import HttpPort

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
