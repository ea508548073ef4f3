"""The dashboard's own port."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from starlette.types import ASGIApp

from workers.listening import ConnectionLimits, EverybodyEnters
from workers.serving import BoundedServer

GRACE: Final = timedelta(seconds=3)
LIMITS: Final = ConnectionLimits(
    busy=200,
    connections=230,
    per_client=100,
    answer=timedelta(seconds=150),  # longer than any page or action takes
    streams=True,
)
NEVER_READ_MS: Final = 30_000
_BACKLOG: Final = 128


def listen(address: str, port: int) -> socket.socket:
    """Open the port. A connection whose other side takes nothing for 30 s is cut, where the system can do that.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    opened = socket.create_server((address, port), family=family, backlog=_BACKLOG)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # of Linux; accepted connections inherit it
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, NEVER_READ_MS)
    return opened


class DashboardServer(BoundedServer):
    """Serves the dashboard until asked to stop. Behind a proxy no client has a share: the proxy has all connections."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        before_stop: Callable[[], None],
        behind_proxy: bool = False,
        limits: ConnectionLimits = LIMITS,
    ) -> None:
        super().__init__(app, grace=GRACE, limits=limits, doorkeeper=EverybodyEnters(shares=not behind_proxy))
        self._before_stop = before_stop

    def request_stop(self) -> None:
        """End the streams, which would never end by themselves, and accept no more connections."""
        self._before_stop()
        super().request_stop()
