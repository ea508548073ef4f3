"""The dashboard's own port."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Final

import uvicorn
from starlette.types import ASGIApp

GRACE: Final = timedelta(seconds=3)
MOST_CONNECTIONS: Final = 200
NEVER_READ_MS: Final = 30_000
_BACKLOG: Final = 128
_MAX_HEAD_BYTES: Final = 16 * 1024


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


class DashboardServer(uvicorn.Server):
    """Serves the dashboard until asked to stop. The process handles signals, not this server."""

    def __init__(self, app: ASGIApp, *, before_stop: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                proxy_headers=False,
                server_header=False,
                limit_concurrency=MOST_CONNECTIONS,
                h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
                timeout_keep_alive=5,
                timeout_graceful_shutdown=round(GRACE.total_seconds()),
            )
        )
        self._before_stop = before_stop

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield

    def request_stop(self) -> None:
        """End the streams, which would never end by themselves, and accept no more connections."""
        self._before_stop()
        self.force_exit = self.should_exit
        self.should_exit = True
