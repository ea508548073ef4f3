"""One HTTP exchange with a server that nobody vouches for, bounded in time and memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from datetime import timedelta
from types import MappingProxyType, TracebackType
from typing import Self

import httpx

from federation.http.errors import TRANSPORT_FAILURES, BodyTooLarge, network_error
from federation.http.guard import AddressGuard, Target
from federation.http.response import Response
from federation.http.transport import pooled_transport

DEFAULT_TIMEOUT = timedelta(seconds=10)
MAX_BODY_BYTES = 1024 * 1024

NO_HEADERS: Mapping[str, str] = MappingProxyType({})

# `identity` because bodies are never decompressed: a few kilobytes could become gigabytes.
_OWN_HEADERS = {"User-Agent": "federation-delivery", "Accept": "*/*", "Accept-Encoding": "identity"}

# aiohttp warns about larger bodies given as bytes.
_LARGEST_PLAIN_BODY = 1024 * 1024
_UPLOAD_CHUNK = 64 * 1024


class FederationClient:
    """The process's one HTTP client. Close it, or use it as an async context manager.

    It calls the transport directly and leaves out httpx's client above it, with its redirects, cookies, proxies and
    authentication: none of that may happen here, and it costs as much as the exchange.
    """

    def __init__(self, guard: AddressGuard, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._guard = guard
        self._transport = transport or pooled_transport(guard)

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
            BodyTooLarge: the body has, or announces, more than *max_bytes*.
            BlockedUrl: the guard refuses the URL; nothing was sent.
        """
        target = self._guard.check_url(url)
        request = _request(method, target, headers, body)
        phase = "before the response"
        try:
            end = asyncio.get_running_loop().time() + timeout.total_seconds()
            async with asyncio.timeout(min(first_byte or timeout, timeout).total_seconds()) as deadline:
                response = await self._transport.handle_async_request(request)
                deadline.reschedule(end)
                phase = "while reading the body"
                try:
                    content = await _read_body(response, max_bytes, target.origin)
                finally:
                    await response.aclose()
        except TRANSPORT_FAILURES as exc:
            error = network_error(exc, target.origin, phase)
            if error is None:
                raise
            raise error from exc
        return Response(status=response.status_code, headers=response.headers, body=content)

    async def close(self) -> None:
        """Close every connection. Exchanges still running fail."""
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _request(method: str, target: Target, headers: Mapping[str, str], body: bytes | None) -> httpx.Request:
    merged = {**_OWN_HEADERS, **headers, "Host": target.origin.partition("://")[2]}
    if body is not None:
        merged["Content-Length"] = str(len(body))
    content = body or b""
    stream = httpx.ByteStream(content) if len(content) <= _LARGEST_PLAIN_BODY else _LargeBody(content)
    return httpx.Request(method, target.url, headers=merged, stream=stream)  # httpx adds no headers for a stream


class _LargeBody(httpx.AsyncByteStream):
    """A body that is handed over piece by piece; it can be read again for a repeated request."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self._body), _UPLOAD_CHUNK):
            yield self._body[start : start + _UPLOAD_CHUNK]


async def _read_body(response: httpx.Response, max_bytes: int, origin: str) -> bytes:
    announced = response.headers.get("content-length", "")
    if announced.isdecimal() and (len(announced) > 18 or int(announced) > max_bytes):
        raise BodyTooLarge(f"{origin} announces a body of {announced:.20} bytes, more than {max_bytes}")
    stream = response.stream
    assert isinstance(stream, httpx.AsyncByteStream)
    chunks: list[bytes] = []
    size = 0
    async for chunk in stream:
        size += len(chunk)
        if size > max_bytes:
            raise BodyTooLarge(f"{origin} sends a body of more than {max_bytes} bytes")
        chunks.append(chunk)
    return b"".join(chunks)
