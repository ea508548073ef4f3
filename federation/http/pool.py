"""The connections of one process, kept open for a while for the next request.

Stale connections. A server may close an idle connection at the very moment at which a request is written to it, and the
request then fails although the server is well. Connections idle for longer than four seconds are not used again (common
servers wait at least five), and if a *reused* connection ends before any byte of a response, its request is sent once
more, on a fresh one. It may thereby arrive twice, as after any lost response: receivers deduplicate. If a fresh
connection is closed at once, that is the server's answer, and it is not retried here.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import aiohappyeyeballs
import httpx

from federation.base.settings.settings import Settings
from federation.http.connection import Connection
from federation.http.errors import ServerDisconnected
from federation.http.guard import AddressGuard, Resolver, SystemResolver, Target, VettedNames
from federation.http.messages import Request, Response
from federation.http.tls import TlsConnection

_NEXT_ADDRESS_SECONDS: Final = 0.25
"""How long the first address may take before the next is tried beside it (RFC 8305, 5)."""
_LOST = (ServerDisconnected, OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """Bounds of one pool.

    `connections` are those in use at a time. An exchange beyond that waits while its own deadline runs, so allow for as
    many as there are exchanges at once. `idle_servers` is how many servers may keep idle connections, each for
    `kept_seconds`.
    """

    connections: int = 200
    connections_per_server: int = 8
    idle_servers: int = 512
    kept_seconds: float = 4.0


DEFAULT_LIMITS = PoolLimits()


@dataclass(slots=True)
class _Peer:
    """The connections to one server; `users` are the exchanges under way or waiting."""

    slots: asyncio.Semaphore
    idle: list[Connection] = field(default_factory=list)
    users: int = 0


class ConnectionPool:
    """Carries requests over pooled, guarded connections, of one event loop.

    By default, the operating system resolves names, and certificates are verified against `SSL_CERT_FILE` or
    `SSL_CERT_DIR` if set, otherwise against certifi's authorities. No proxy, no cookies, no redirects.
    """

    def __init__(
        self,
        guard: AddressGuard,
        *,
        resolver: Resolver | None = None,
        ssl_context: ssl.SSLContext | None = None,
        limits: PoolLimits = DEFAULT_LIMITS,
    ) -> None:
        self._names = VettedNames(guard, resolver or SystemResolver())
        self._context = ssl_context or httpx.create_ssl_context()
        self._limits = limits
        self._slots = asyncio.Semaphore(limits.connections)
        self._servers: dict[str, _Peer] = {}
        self._idle_servers = 0
        self._used: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    async def exchange(self, request: Request, began: Callable[[], None]) -> Response:
        """Return the whole response; see `Carrier`."""
        origin = request.target.origin
        server = self._servers.get(origin)
        if server is None:
            server = self._servers[origin] = _Peer(asyncio.Semaphore(self._limits.connections_per_server))
        server.users += 1
        try:
            async with server.slots, self._slots:
                return await self._through(server, request, began)
        finally:
            server.users -= 1
            if not server.users and not server.idle:
                del self._servers[origin]

    async def aclose(self) -> None:
        """Close every connection. Exchanges still running fail."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in [*self._used, *(each for server in self._servers.values() for each in server.idle)]:
            connection.abort()
        await self._names.close()
        await asyncio.sleep(0)  # the event loop closes their sockets
        await asyncio.sleep(0)

    async def _through(self, server: _Peer, request: Request, began: Callable[[], None]) -> Response:
        kept = self._take(server)
        if kept is not None:
            try:
                return await self._over(kept, server, request, began)
            except _LOST:
                if kept.was_heard or self._closed:
                    raise
        return await self._over(await self._dial(request.target), server, request, began)

    async def _over(
        self, connection: Connection, server: _Peer, request: Request, began: Callable[[], None]
    ) -> Response:
        self._used.add(connection)
        try:
            response = await connection.exchange(request, began)
        finally:
            self._used.discard(connection)
        if connection.is_open:
            self._keep(connection, server)
        return response

    def _take(self, server: _Peer) -> Connection | None:
        """Return the connection used last, if it can be used again."""
        oldest = _now() - self._limits.kept_seconds
        while server.idle:
            connection = server.idle.pop()
            if not server.idle:
                self._idle_servers -= 1
            if connection.is_open and connection.idle_since >= oldest:
                return connection
            connection.abort()
        return None

    def _keep(self, connection: Connection, server: _Peer) -> None:
        if not server.idle:
            # Without a bound, deliveries to thousands of servers would leave thousands of idle descriptors behind.
            if self._idle_servers >= self._limits.idle_servers:
                connection.abort()
                return
            self._idle_servers += 1
        connection.idle_since = _now()
        server.idle.append(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self._limits.kept_seconds, self._close_old)

    def _close_old(self) -> None:
        """Close connections that were idle for too long, so that none stays open because nobody asks for its server."""
        self._sweep = None
        oldest = _now() - self._limits.kept_seconds
        for origin, server in list(self._servers.items()):
            if not server.idle:
                continue
            old = [each for each in server.idle if not each.is_open or each.idle_since <= oldest]
            for connection in old:
                connection.abort()
                server.idle.remove(connection)
            if not server.idle:
                self._idle_servers -= 1
                if not server.users:
                    del self._servers[origin]
        if self._idle_servers:
            self._sweep = asyncio.get_running_loop().call_later(self._limits.kept_seconds, self._close_old)

    async def _dial(self, target: Target) -> Connection:
        if self._closed:
            raise RuntimeError("the connections to other servers are closed")
        if target.address is not None:
            addresses = [str(target.address)]
        else:
            addresses = list(await self._names.addresses(target.host, target.port))
        found = [_address_info(address, target.port) for address in addresses]
        connection = TlsConnection(self._context, target.host) if target.url.scheme == "https" else Connection()
        opened = await aiohappyeyeballs.start_connection(found, happy_eyeballs_delay=_NEXT_ADDRESS_SECONDS)
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=opened)
        await connection.ready()
        return connection


def _now() -> float:
    return asyncio.get_running_loop().time()


def _address_info(address: str, port: int) -> aiohappyeyeballs.AddrInfoType:
    if ":" in address:
        return socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port, 0, 0)
    return socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port)


SPARE_CONNECTIONS: Final = 60
"""For the inbound side (16 callbacks, 32 forwards), a sweep (10) and producers, in addition to the workers' own."""


def pool_limits(settings: Settings) -> PoolLimits:
    """Return limits with room for every attempt and probe at once: waiting for one would count against the server."""
    queues_of_deliveries = 2 if settings.federation_activitypub else 1
    attempts = (
        queues_of_deliveries * settings.federation_delivery_concurrency
        + 2 * settings.federation_overtime  # deliveries and discoveries each have that much room
        + settings.federation_health_concurrency
        + settings.federation_discovery_concurrency
    )
    return PoolLimits(
        connections=attempts + SPARE_CONNECTIONS,
        connections_per_server=settings.federation_per_server + settings.federation_health_concurrency + 1,
    )
