"""The pooled, guarded connections of one process: httpx's transport interface over aiohttp.

httpx's own pool scans all its connections for every request, which costs more than the request itself from a hundred
servers on; aiohttp's pool looks its connections up by server.

Stale connections. A server may close an idle connection at the very moment at which a request is written to it, and the
request then fails although the server is well. Connections idle for longer than four seconds are not used again (common
servers wait at least five), and if a *reused* connection ends before any response, its request is sent once more. It
may thereby arrive twice, as after any lost response: receivers deduplicate. If a fresh connection is closed at once,
that is the server's answer, and it is not retried here.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol

import aiohttp
import httpx
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ClientRequest, ConnectionKey
from aiohttp.tracing import Trace
from httpx_aiohttp.transport import AiohttpResponseStream, map_aiohttp_exceptions
from yarl import URL

from federation.http.guard import AddressGuard

_KEEPALIVE_SECONDS = 4
_DNS_CACHE_SECONDS = 10
_RESOLVER_THREADS = 80

# Written by the connector, read by the transport, both in the task of one request.
_dialled: ContextVar[bool] = ContextVar("dialled", default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """Bounds of one pool.

    `connections` are those in use at a time. An exchange beyond that waits while its own deadline runs, so allow for as
    many as there are exchanges at once. `idle_servers` is how many servers may keep idle connections.
    """

    connections: int = 200
    connections_per_server: int = 8
    idle_servers: int = 512


DEFAULT_LIMITS = PoolLimits()


class Resolver(Protocol):
    """Resolves host names to addresses."""

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """Return the addresses of *host*, in the order in which to try them.

        Raises:
            OSError: `socket.gaierror` if the name has none or the name service does not answer.
        """


class SystemResolver:
    """The operating system's resolver, on threads of its own.

    A lookup that hangs holds its thread for up to half a minute, even when nobody waits for it any more. In the event
    loop's shared pool, a few of them would stop everything else that needs a thread. Strangers can make the inbound
    side look up names of their choice; there are more threads here than lookups that they can have under way.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_RESOLVER_THREADS, thread_name_prefix="resolve")

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, _getaddrinfo, host, port)


def _getaddrinfo(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return [str(sockaddr[0]) for *_, sockaddr in found]


class GuardedResolver(AbstractResolver):
    """Gives aiohttp only vetted addresses: what it caches for ten seconds and connects to has passed the guard."""

    def __init__(self, guard: AddressGuard, resolver: Resolver) -> None:
        self._guard = guard
        self._resolver = resolver

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        addresses = await self._resolver.resolve(host, port)
        self._guard.vet(host, addresses, port=port)
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        """Do nothing: the resolver's threads end with it."""


class _Protocol(ResponseHandler):
    """aiohttp's protocol, which also recognises a reset.

    If only the end of the connection delimits a body, aiohttp takes a reset for the complete body.
    """

    def connection_lost(self, exc: BaseException | None) -> None:
        if exc is not None and self._payload is not None and not self._payload.is_eof():
            self._payload.set_exception(exc)
        super().connection_lost(exc)


class _Connector(aiohttp.TCPConnector):
    """aiohttp's pool, which also distinguishes fresh connections from reused ones and bounds the idle ones."""

    def __init__(self, guarded: GuardedResolver, context: ssl.SSLContext, limits: PoolLimits) -> None:
        super().__init__(
            ssl=context,
            resolver=guarded,
            ttl_dns_cache=_DNS_CACHE_SECONDS,
            keepalive_timeout=_KEEPALIVE_SECONDS,
            limit=limits.connections,
            limit_per_host=limits.connections_per_server,
        )
        self._max_idle_servers = limits.idle_servers
        protocol: type[ResponseHandler] = _Protocol
        self._factory = partial(protocol, loop=self._loop)

    async def _create_connection(
        self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        _dialled.set(True)
        return await super()._create_connection(req, traces, timeout)

    def _release(self, key: ConnectionKey, protocol: ResponseHandler, *, should_close: bool = False) -> None:
        # aiohttp's `limit` counts connections in use only: deliveries to thousands of servers would otherwise leave
        # thousands of idle descriptors behind.
        full = len(self._conns) >= self._max_idle_servers and key not in self._conns
        super()._release(key, protocol, should_close=should_close or full)


class PooledTransport(httpx.AsyncBaseTransport):
    """An httpx transport that sends a request again, once, if a reused connection proves to have been closed.

    What `httpx_aiohttp.AiohttpTransport` does in addition, for authentication, proxies and timeouts, costs as much as
    aiohttp's own share of an exchange.
    """

    def __init__(self, open_session: Callable[[], aiohttp.ClientSession]) -> None:
        self._open_session = open_session
        self._session: aiohttp.ClientSession | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        _dialled.set(False)
        try:
            return await self._exchange(request)
        except httpx.TransportError as exc:
            if _dialled.get() or not isinstance(exc.__cause__, _CONNECTION_LOST):
                raise
        return await self._exchange(request)

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _exchange(self, request: httpx.Request) -> httpx.Response:
        if self._session is None:
            self._session = self._open_session()
        stream = request.stream
        assert isinstance(stream, httpx.AsyncByteStream)
        with map_aiohttp_exceptions():
            response = await self._session.request(
                request.method,
                _address(str(request.url)),
                headers=[(name.decode("ascii"), value.decode("ascii")) for name, value in request.headers.raw],
                data=b"".join(stream) or None if isinstance(stream, httpx.ByteStream) else stream,
                allow_redirects=False,
            )
        return httpx.Response(response.status, headers=response.raw_headers, stream=AiohttpResponseStream(response))


# yarl's own cache has 128 places, fewer than there are servers.
_address = lru_cache(maxsize=1024)(URL)


_CONNECTION_LOST = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientConnectionResetError)


def pooled_transport(
    guard: AddressGuard,
    *,
    resolver: Resolver | None = None,
    ssl_context: ssl.SSLContext | None = None,
    limits: PoolLimits = DEFAULT_LIMITS,
) -> httpx.AsyncBaseTransport:
    """Make a transport for one event loop; it opens its pool at the first request.

    By default, the operating system resolves names, and certificates are verified against `SSL_CERT_FILE` or
    `SSL_CERT_DIR` if set, otherwise against certifi's authorities. No proxy, no cookies, no redirects, no
    decompression.
    """
    context = ssl_context or httpx.create_ssl_context()

    def open_session() -> aiohttp.ClientSession:
        session = aiohttp.ClientSession(
            connector=_Connector(GuardedResolver(guard, resolver or SystemResolver()), context, limits),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(),  # none: the client has one deadline over all
            trust_env=False,
        )
        # aiohttp would repeat every idempotent request, even one that failed on a fresh connection.
        session._retry_connection = False
        return session

    return PooledTransport(open_session)
