"""One HTTP exchange with a server that nobody vouches for, bounded in time and memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType, TracebackType
from typing import Self

import httpx

from federation.http.encoding import inflated
from federation.http.errors import TRANSPORT_FAILURES, network_error
from federation.http.guard import AddressGuard
from federation.http.injected import InjectedTransport
from federation.http.pool import ConnectionPool
from federation.http.request import Carrier, Request
from federation.http.response import Response

DEFAULT_TIMEOUT = timedelta(seconds=10)
MAX_BODY_BYTES = 1024 * 1024

NO_HEADERS: Mapping[str, str] = MappingProxyType({})

# `identity` because what is compressed costs both sides more than it saves; see `encoding` for those who do it anyway.
_OWN_HEADERS = {"User-Agent": "federation-delivery", "Accept": "*/*", "Accept-Encoding": "identity"}


class FederationClient:
    """The process's one HTTP client. Close it, or use it as an async context manager.

    Its requests go over *connections*, by default a pool of its own, or over an httpx transport: so an application's
    tests answer for other servers with `respx`.
    """

    def __init__(
        self, guard: AddressGuard, connections: ConnectionPool | httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._guard = guard
        self._carrier: Carrier = (
            InjectedTransport(connections)
            if isinstance(connections, httpx.AsyncBaseTransport)
            else connections or ConnectionPool(guard)
        )

    async def fetch(
        self,
        url: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] = NO_HEADERS,
        body: bytes | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        first_byte: timedelta | None = None,
        max_bytes: int = MAX_BODY_BYTES,
    ) -> Response:
        """Return the server's whole response, whatever its status. Redirects are responses like any other.

        *timeout* covers everything from the wait for a pooled connection to the last byte of the body; *first_byte*, if
        it is shorter, everything until the response begins. A cancelled or failed exchange closes its connection, a
        complete one returns it to the pool.

        Raises:
            NetworkError: no complete response; the message says which phase failed and why. Worth another try.
            BodyTooLarge: the body has, announces, or inflates to more than *max_bytes*.
            BlockedUrl: the guard refuses the URL; nothing was sent.
        """
        request = Request(
            method=method,
            target=self._guard.check_url(url),
            headers={**_OWN_HEADERS, **headers},
            body=body,
            max_bytes=max_bytes,
        )
        phase = "before the response"

        def began() -> None:
            nonlocal phase
            phase = "while reading the body"
            if first_byte is not None and not deadline.expired():
                deadline.reschedule(end)

        end = asyncio.get_running_loop().time() + timeout.total_seconds()
        try:
            async with asyncio.timeout(min(first_byte or timeout, timeout).total_seconds()) as deadline:
                response = await self._carrier.exchange(request, began)
        except TRANSPORT_FAILURES as exc:
            error = network_error(exc, request.target.origin, phase)
            if error is None:
                raise
            raise error from exc
        return response if response.encoding is None else inflated(response, request)

    async def close(self) -> None:
        """Close every connection. Exchanges still running fail."""
        await self._carrier.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
