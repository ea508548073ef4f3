"""One connection to a server, which carries one exchange at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from hashlib import sha256
from typing import cast

from federation.http.reading import ResponseReader
from federation.http.request import Request
from federation.http.response import Response

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
