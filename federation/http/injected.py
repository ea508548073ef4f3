"""An httpx transport instead of our own connections: how an application's tests answer for other servers."""

from __future__ import annotations

from collections.abc import Callable

import httpx

from federation.http.errors import BodyTooLarge
from federation.http.request import Request
from federation.http.response import Response


class InjectedTransport:
    """Carries requests over an httpx transport, such as `respx`'s or `httpx.MockTransport`.

    It calls the transport directly and leaves out httpx's client above it, with its redirects, cookies, proxies and
    authentication: none of that may happen here.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self._transport = transport

    async def exchange(self, request: Request, began: Callable[[], None]) -> Response:
        """Return the whole response; see `Carrier`."""
        headers = {**request.framing, **request.headers}
        stream = httpx.ByteStream(request.body or b"")  # httpx adds no headers for a stream
        response = await self._transport.handle_async_request(
            httpx.Request(request.method, request.target.url, headers=headers, stream=stream)
        )
        try:
            began()
            body = await _read_body(response, request)
        finally:
            await response.aclose()
        encoding = response.headers.get("content-encoding")
        return Response(status=response.status_code, headers=response.headers, body=body, encoding=encoding)

    async def aclose(self) -> None:
        """Close the transport."""
        await self._transport.aclose()


async def _read_body(response: httpx.Response, request: Request) -> bytes:
    origin, most = request.target.origin, request.max_bytes
    announced = response.headers.get("content-length", "")
    if announced.isdecimal() and (len(announced) > 18 or int(announced) > most):
        raise BodyTooLarge(f"{origin} announces a body of {announced:.20} bytes, more than {most} bytes")
    stream = response.stream
    assert isinstance(stream, httpx.AsyncByteStream)
    body = bytearray()
    async for chunk in stream:
        body += chunk
        if len(body) > most:
            raise BodyTooLarge(f"{origin} sends a body, more than {most} bytes")
    return bytes(body)
