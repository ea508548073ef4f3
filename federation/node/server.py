"""The inbound side's server: the bounded one, with what this process has seen of its clients."""

from __future__ import annotations

from datetime import timedelta
from http import HTTPStatus
from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp

from federation.node.clients import Clients, ClientStanding, turned_away
from workers.listening import ConnectionLimits
from workers.serving import BoundedServer

DEFAULT_LIMITS: Final = ConnectionLimits()


def _written(response: Response) -> bytes:
    """Return the bytes of the response on a connection that closes after it."""
    head = [b"HTTP/1.1 %d %s" % (response.status_code, HTTPStatus(response.status_code).phrase.encode())]
    head += [b"%s: %s" % header for header in [*response.raw_headers, (b"connection", b"close")]]
    return b"\r\n".join([*head, b"", bytes(response.body)])


_TURNED_AWAY: Final = _written(turned_away().response())


class NodeServer(BoundedServer):
    """Serves the inbound side."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        grace: timedelta,
        limits: ConnectionLimits = DEFAULT_LIMITS,
        clients: Clients | None = None,
        standing: ClientStanding | None = None,
    ) -> None:
        doorkeeper = _Doorkeeper(clients or Clients(), standing or ClientStanding())
        super().__init__(app, grace=grace, limits=limits, doorkeeper=doorkeeper)


class _Doorkeeper:
    """Bars clients by their standing. A proxy that *clients* trusts has no share: it stands for many clients."""

    def __init__(self, clients: Clients, standing: ClientStanding) -> None:
        self._clients = clients
        self._standing = standing

    def client(self, host: str) -> str | None:
        return self._clients.of_connection(host)

    def refusal(self, client: str | None) -> bytes | None:
        return _TURNED_AWAY if self._standing.turns_away(client) else None
