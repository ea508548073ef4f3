"""The response to one request, put together from what arrives, bounded in memory and in framing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import httptools

from federation.http.errors import BodyTooLarge, BrokenBody, MalformedResponse, ServerDisconnected
from federation.http.request import Request
from federation.http.response import Response

MAX_HEAD_BYTES: Final = 64 * 1024
"""Of all headers together, and of what follows them in the same packet."""
MAX_INTERIM: Final = 8
"""How many responses of 1xx may precede the final one."""
_FRAMING: Final = 8
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

        Garbage collections would have to find them, and come seldom; see `process.set_aside_loaded`.
        """
        del self._parser

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
        if announced is not None and int(announced) > self._request.max_bytes:
            self._fail(self._too_large(f"announces a body of {announced[:20].decode('latin-1')} bytes"))
        elif self._request.method == "HEAD":
            self._succeed()
        else:
            self._until_closed = status not in _BODILESS and announced is None and b"transfer-encoding" not in names
            self._began()

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > self._request.max_bytes:
            self._fail(self._too_large("sends a body"))
        elif not self.done.done():
            self._body.append(body)

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
        elif self._received > MAX_HEAD_BYTES + _FRAMING * self._request.max_bytes:
            self._fail(self._too_large("sends, in tiny pieces, a body"))

    def _succeed(self) -> None:
        assert self._status is not None
        headers = ResponseHeaders(self._headers)
        encoding = headers["content-encoding"] if self._is_encoded else None
        body = b"".join(self._body)
        self.done.set_result(
            Response(status=self._status, headers=headers, body=body, encoding=encoding, answerer=self._answerer)
        )

    def _fail(self, error: Exception, cause: Exception | None = None) -> None:
        if not self.done.done():
            self._body.clear()
            if cause is not None:
                error.__cause__ = cause
            self.done.set_exception(error)

    def _malformed(self, why: str) -> MalformedResponse:
        return MalformedResponse(f"the response is malformed: {why}")

    def _too_large(self, what: str) -> BodyTooLarge:
        return BodyTooLarge(f"{self._request.target.origin} {what}, more than {self._request.max_bytes} bytes")
