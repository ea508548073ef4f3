"""One connection to a server, which carries one exchange at a time; what arrives is bounded in memory and framing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from typing import Final, cast

import httptools

from federation.http.errors import BodyTooLarge, BrokenBody, MalformedResponse, ServerDisconnected
from federation.http.messages import BODY_PATIENCE, Request, Response

MAX_HEAD_BYTES: Final = 64 * 1024
"""Of all headers together, and of what follows them in the same packet."""
MAX_INTERIM: Final = 8
"""How many responses of 1xx may precede the final one."""
_OVERHEAD: Final = 8
"""How many times its own size a body may take on the wire: chunks of a single byte take six."""
_BODILESS = frozenset({204, 304})


class ResponseHeaders(Mapping[str, str]):
    """Headers by name in any case, decoded when first asked for; those of one name are joined by commas."""

    __slots__ = ("_decoded", "_raw")

    def __init__(self, raw: list[tuple[bytes, bytes]]) -> None:
        self._raw = raw
        self._decoded: dict[str, str] | None = None

    def __getitem__(self, name: str) -> str:
        return self._by_name()[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name())

    def __len__(self) -> int:
        return len(self._by_name())

    def _by_name(self) -> dict[str, str]:
        if self._decoded is None:
            self._decoded = {}
            for raw_name, raw_value in self._raw:
                name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
                before = self._decoded.get(name)
                self._decoded[name] = value if before is None else f"{before}, {value}"
        return self._decoded


class ResponseReader:
    """Reads one response; `done` has it, or why there is none. Whatever comes after that spoils the connection.

    httptools calls the methods that begin with `on_`; what they raise would not come out as it is, so they raise
    nothing.
    """

    def __init__(self, request: Request, began: Callable[[], None], answerer: bytes) -> None:
        self.done: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self.heard = False
        """Whether a single byte has arrived."""
        self.keeps_alive = False
        """Whether the connection can carry another request, once this is done."""
        self._request = request
        self._began = began
        self._answerer = answerer
        self._parser = httptools.HttpResponseParser(self)
        self._received = 0
        self._interim = 0
        self._status: int | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._until_closed = False
        self._is_encoded = False
        self._body: list[bytes] = []
        self._size = 0
        self._patience: asyncio.TimerHandle | None = None

    def feed(self, data: bytes) -> None:
        """Take what has arrived."""
        self.heard = True
        if self.done.done():
            self.keeps_alive = False  # nobody asked for more
            return
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(self._malformed("it is no HTTP/1.1 response"), error)
        self._check_framing()

    def end(self, error: Exception | None) -> None:
        """Take note that the connection has ended, for *error* or in good order."""
        if self.done.done():
            return
        if error is not None:
            self._fail(error)
        elif self._status is None:
            self._fail(ServerDisconnected("the connection was closed instead of a response"))
        elif self._until_closed:
            self._succeed()
        else:
            self._fail(BrokenBody("the connection was closed in the middle of a body"))

    def release(self) -> None:
        """Forget the parser, once nothing is fed any more: both hold each other, and with them request and response.

        Garbage collections would have to find them, and come seldom; see `runtime.nodes.set_aside_loaded`.
        """
        del self._parser
        if self._patience is not None:
            self._patience.cancel()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._status is None:  # no trailer
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self._skip_interim()
            return
        self._status = status
        names = {name.lower(): value for name, value in self._headers}
        self._is_encoded = b"content-encoding" in names
        announced = names.get(b"content-length")
        if announced is not None and int(announced) > self._request.max_bytes and not self._request.head_decides:
            self._fail(self._too_large(f"announces a body of {announced[:20].decode('latin-1')} bytes"))
        elif self._request.method == "HEAD":
            self._succeed()
        else:
            self._until_closed = status not in _BODILESS and announced is None and b"transfer-encoding" not in names
            if self._request.head_decides:
                self._patience = self.done.get_loop().call_later(BODY_PATIENCE.total_seconds(), self._cut_off)
            self._began()

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if not self.done.done():
            self._body.append(body)
        if self._size > self._request.max_bytes:
            self._fail(self._too_large("sends a body"))

    def on_message_complete(self) -> None:
        if self._status is not None and not self.done.done():
            self.keeps_alive = self._parser.should_keep_alive()
            self._succeed()

    def on_message_begin(self) -> None:
        if self.done.done():
            self.keeps_alive = False  # a second response, to a request that was never sent

    def _skip_interim(self) -> None:
        self._headers = []
        self._interim += 1
        if self._interim > MAX_INTERIM:
            self._fail(self._malformed("it begins again and again"))

    def _check_framing(self) -> None:
        if self.done.done():
            return
        if self._status is None and self._received > MAX_HEAD_BYTES:
            self._fail(self._malformed("its head is too long"))
        elif self._received > MAX_HEAD_BYTES + _OVERHEAD * self._request.max_bytes:
            self._fail(self._too_large("sends, in tiny pieces, a body"))

    def _succeed(self) -> None:
        assert self._status is not None
        headers = ResponseHeaders(self._headers)
        encoding = headers["content-encoding"] if self._is_encoded else None
        body = b"".join(self._body)[: self._request.max_bytes]
        self.done.set_result(
            Response(status=self._status, headers=headers, body=body, encoding=encoding, answerer=self._answerer)
        )

    def _cut_off(self) -> None:
        """Do without the rest of the body."""
        if not self.done.done():
            self._succeed()

    def _fail(self, error: Exception, cause: Exception | None = None) -> None:
        if self._request.head_decides and self._status is not None:
            self._cut_off()
        if not self.done.done():
            self._body.clear()
            if cause is not None:
                error.__cause__ = cause
            self.done.set_exception(error)

    def _malformed(self, why: str) -> MalformedResponse:
        return MalformedResponse(f"the response is malformed: {why}")

    def _too_large(self, what: str) -> BodyTooLarge:
        return BodyTooLarge(f"{self._request.target.origin} {what}, more than {self._request.max_bytes} bytes")


_FRAMING = frozenset({"host", "content-length", "transfer-encoding", "connection"})
_JOINED = 64 * 1024
"""Smaller bodies go out in one piece with their head: one system call, one packet."""


class Connection(asyncio.Protocol):
    """A connection. It closes itself unless an exchange ends in good order.

    Attributes:
        idle_since: when its last exchange ended, on the event loop's clock.
        was_heard: whether a byte of the last response arrived.
        answerer: a fingerprint of the address and the certificate at its other end, once it is ready.
    """

    def __init__(self) -> None:
        self.idle_since = 0.0
        self.was_heard = False
        self.answerer = b""
        self._transport: asyncio.Transport | None = None
        self._reader: ResponseReader | None = None

    @property
    def is_open(self) -> bool:
        """Whether another request may be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def ready(self) -> None:
        """Wait until requests may be sent."""
        assert self._transport is not None
        address = self._transport.get_extra_info("peername") or ("",)
        self.answerer = sha256(str(address[0]).encode() + b"\0" + self._certificate()).digest()

    async def exchange(self, request: Request, began: Callable[[], None]) -> Response:
        """Send the request and return the whole response."""
        head = _head(request)
        reader = self._reader = ResponseReader(request, began, self.answerer)
        try:
            self._send(head, request.body or b"")
            response = await reader.done
        except BaseException:
            self.abort()
            raise
        finally:
            self._reader, self.was_heard = None, reader.heard
            reader.release()
        if not reader.keeps_alive:
            self.abort()
        return response

    def abort(self) -> None:
        """Close it at once; nothing is left to be sent."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._reader is None:
            self.abort()  # nothing was asked
        else:
            self._reader.feed(data)
            if self._reader.done.done() and not self._reader.keeps_alive:
                self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc)

    def _certificate(self) -> bytes:
        """Return the certificate that the server showed; nothing without TLS."""
        return b""

    def _send(self, head: bytes, body: bytes) -> None:
        if len(body) <= _JOINED:
            self._write(head + body)
        else:
            self._write(head)
            self._write(body)

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def _end(self, error: Exception | None) -> None:
        if self._reader is not None:
            self._reader.end(error)


def _head(request: Request) -> bytes:
    """Return the head as bytes.

    Raises:
        ValueError: a header holds a line break, or other than ASCII characters.
    """
    path = request.target.url.raw_path.decode("ascii")
    lines = [f"{request.method} {path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in request.framing.items()]
    lines += [f"{name}: {value}" for name, value in request.headers.items() if name.lower() not in _FRAMING]
    text = "\r\n".join(lines)
    if text.count("\n") >= len(lines) or text.count("\r") >= len(lines) or "\0" in text:
        raise ValueError("a header of the request contains a line break")
    return f"{text}\r\n\r\n".encode("ascii")
