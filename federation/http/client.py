"""HTTP exchanges with servers that nobody vouches for, bounded in time and memory; by a relay, if one may help.

`FederationClient` does one exchange. `FederationFetch` also records the failure of a direct request, and then tries a
peer.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType, TracebackType
from typing import Final, Protocol, Self

import httpx
import structlog
from msgspec.structs import replace

from federation.base.logs import crash
from federation.http.errors import TRANSPORT_FAILURES, BodyTooLarge, NetworkError, RelayFailed, network_error
from federation.http.guard import AddressGuard, parse_target
from federation.http.messages import BODY_PATIENCE, Carrier, Request, Response
from federation.http.pool import ConnectionPool
from federation.http.threat_policy import NO_OVERRIDES, NetworkErrorCode, PolicyOverride, get_threat_policy
from federation.protocol.values import Value
from workers.clock import monotonic

log = structlog.get_logger(__name__)


class InjectedTransport:
    """Carries requests over an httpx transport, such as `respx`'s or `httpx.MockTransport`, not our own connections.

    So an application's tests answer for other servers.

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
    if request.head_decides:
        return await _read_beginning(response, request.max_bytes)
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


async def _read_beginning(response: httpx.Response, most: int) -> bytes:
    stream, body = response.stream, bytearray()
    assert isinstance(stream, httpx.AsyncByteStream)
    with suppress(*TRANSPORT_FAILURES):  # one of them is the end of our patience
        async with asyncio.timeout(BODY_PATIENCE.total_seconds()):
            async for chunk in stream:
                body += chunk
                if len(body) >= most:
                    break
    return bytes(body[:most])


MAX_LAYERS: Final = 2
"""An application and the CDN before it may each compress once."""
_MAX_SHOWN: Final = 40
_UNSHOWABLE: Final = re.compile(r"[^!-~ ]")
_GZIP: Final = (16 + zlib.MAX_WBITS,)
_DEFLATE: Final = (zlib.MAX_WBITS, -zlib.MAX_WBITS)  # RFC 9110 means zlib's format, and some servers send it bare
_WINDOWS: Final = {"gzip": _GZIP, "x-gzip": _GZIP, "deflate": _DEFLATE}


def inflated(response: Response, request: Request) -> Response:
    """Return the response with the body that was meant, of a server or CDN that compressed although asked not to.

    It is inflated in memory, up to the size that a body may have, and not a byte further: a megabyte may stand for
    gigabytes. If its encoding cannot be undone, the body stays, and the encoding is fit to be shown: some servers name
    one and do not use it. Streams in one row and what follows a stream are not read: readers differ on what they mean.

    Raises:
        BodyTooLarge: it inflates to more than `request.max_bytes`.
    """
    names = [name.strip().lower() for name in (response.encoding or "").split(",")]
    layers = [name for name in names if name not in ("", "identity")]
    if not response.body or not layers:
        return replace(response, encoding=None)
    if len(layers) > MAX_LAYERS or not _WINDOWS.keys() >= set(layers):
        return _left(response)
    body = response.body
    try:
        for name in reversed(layers):
            body = _inflated(body, _WINDOWS[name], request)
    except zlib.error:
        return _left(response)
    return replace(response, body=body, encoding=None)


def _left(response: Response) -> Response:
    return replace(response, encoding=_UNSHOWABLE.sub("?", (response.encoding or "")[:_MAX_SHOWN]))


def _inflated(body: bytes, windows: tuple[int, ...], request: Request) -> bytes:
    """Inflate *body*, which is a single whole stream in one of the formats.

    Raises:
        BodyTooLarge: see `inflated`.
        zlib.error: it is no such stream.
    """
    most = request.max_bytes
    for window in windows:
        inflater = zlib.decompressobj(window)
        try:
            found = inflater.decompress(body, most + 1)
        except zlib.error:
            continue
        if len(found) > most:
            raise BodyTooLarge(f"{request.target.origin} sends a body that inflates to more than {most} bytes")
        if inflater.eof and not inflater.unused_data:
            return found
    raise zlib.error("no single stream that is whole")


DEFAULT_TIMEOUT = timedelta(seconds=10)
MAX_BODY_BYTES = 1024 * 1024

NO_HEADERS: Mapping[str, str] = MappingProxyType({})

# `identity` because what is compressed costs both sides more than it saves; see `inflated` for those who do it anyway.
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
        head_decides: bool = False,
    ) -> Response:
        """Return the server's whole response, whatever its status. Redirects are responses like any other.

        *timeout* covers everything from the wait for a pooled connection to the last byte of the body; *first_byte*, if
        it is shorter, everything until the response begins. A cancelled or failed exchange closes its connection, a
        complete one returns it to the pool. With *head_decides* the body may be anything: once the response has begun,
        there is one; see `Request`.

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
            head_decides=head_decides,
        )
        phase = "before the response"

        def began() -> None:
            nonlocal phase
            phase = "while reading the body"
            if head_decides and not deadline.expired():
                deadline.reschedule(None)  # `BODY_PATIENCE` ends it
            elif first_byte is not None and not deadline.expired():
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
        return response if response.encoding is None or head_decides else inflated(response, request)

    async def close(self) -> None:
        """Close every connection. Exchanges still running fail."""
        await self._carrier.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboundRequest:
    """One request to the registered server `server_url`, as it goes out directly, or sealed through a relay."""

    url: str
    server_url: str
    method: str
    headers: Mapping[str, str]
    body: bytes | None = field(repr=False)


class Fetched(Value, frozen=True, kw_only=True):
    """A response, and the peer that relayed it, which is None if it came directly."""

    response: Response
    peer: str | None = None

    @property
    def proxied(self) -> bool:
        """Whether a peer relayed the response."""
        return self.peer is not None


class MarkUnhealthy(Protocol):
    """Records that *server_url* failed with *code*."""

    async def __call__(self, server_url: str, code: NetworkErrorCode) -> object: ...


class SendThroughPeer(Protocol):
    """Sends *request* through a peer within *remaining*.

    Raises:
        RelayFailed: no peer passed it on.
    """

    async def __call__(self, request: OutboundRequest, remaining: timedelta) -> Fetched: ...


class FederationFetch:
    """Callable that behaves as `federation_fetch`; there is one per process."""

    def __init__(
        self,
        client: FederationClient,
        *,
        mark_unhealthy: MarkUnhealthy,
        relay: SendThroughPeer | None = None,
        policy_overrides: Mapping[NetworkErrorCode, PolicyOverride] = NO_OVERRIDES,
    ) -> None:
        self._client = client
        self._mark_unhealthy = mark_unhealthy
        self._relay = relay
        self._policy_overrides = policy_overrides

    async def __call__(
        self,
        url: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] = NO_HEADERS,
        body: bytes | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        first_byte: timedelta | None = None,
        proxy_fallback: bool = False,
        server_url: str | None = None,
        skip_health_update: bool = False,
    ) -> Fetched:
        """Fetch *url* directly or, with *proxy_fallback*, through a peer, within *timeout* altogether.

        A direct response has to begin within *first_byte*, if that is given.

        On a network error *server_url* (default: the origin of *url*) is marked unhealthy with its code, unless
        *skip_health_update* is set; a failure to record that is only logged. A success is not recorded. A relay is
        tried if the code's policy allows it; its failure is logged.

        Raises:
            NetworkError: the direct request failed, and no relay helped. The code is that of the direct failure in any
                case; if a relay was tried, its failure is the cause, and the message has both.
            BodyTooLarge, BlockedUrl: as `FederationClient.fetch`; the server's health is left alone.
        """
        started = monotonic()
        server = server_url or parse_target(url).origin
        try:
            response = await self._client.fetch(
                url, method=method, headers=headers, body=body, timeout=timeout, first_byte=first_byte
            )
        except NetworkError as error:
            if not skip_health_update:
                await self._record(server, error.code)
            remaining = timeout - timedelta(seconds=monotonic() - started)
            if not proxy_fallback or not self._may_relay(error, remaining):
                raise
            request = OutboundRequest(url=url, server_url=server, method=method, headers=headers, body=body)
            return await self._relayed(request, error, remaining)
        return Fetched(response=response)

    async def _record(self, server_url: str, code: NetworkErrorCode) -> None:
        try:
            await self._mark_unhealthy(server_url, code)
        except Exception as error:
            log.error("server_mark_unhealthy_failed", server_url=server_url, code=code, **crash(error))

    def _may_relay(self, error: NetworkError, remaining: timedelta) -> bool:
        allowed = get_threat_policy(error.code, self._policy_overrides).relay_eligible
        return self._relay is not None and allowed and remaining > timedelta()

    async def _relayed(self, request: OutboundRequest, error: NetworkError, remaining: timedelta) -> Fetched:
        assert self._relay is not None
        try:
            return await self._relay(request, remaining)
        except RelayFailed as failure:
            log.warning("relay_failed", server_url=request.server_url, code=error.code, error=str(failure))
            raise NetworkError(error.code, error.origin, f"{error.detail}; relay: {failure}") from error
        except Exception as exc:  # for example a database in trouble: the result of the direct request counts
            log.warning("relay_failed", server_url=request.server_url, code=error.code, error=type(exc).__name__)
            raise error from error.__cause__
