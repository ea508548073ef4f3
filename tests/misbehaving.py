"""A loopback HTTP server that answers as badly as a test asks for, request by request.

    async with MisbehavingServer() as server:
        server.default = respond(200, body=b"{}")
        server.upcoming += [reset(), hang()]  # the next two requests; then `default` again
        server.routes["/discover"] = respond_with(lambda request: Canned(body=...))

A behaviour is an async callable of the request and the connection's `Exchange`; write your own if none fits. The
connection stays open for another request if the behaviour returns, unless it closed it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One request as it arrived; header names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Canned:
    """One well-formed response."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b"{}"


@dataclass(slots=True)
class Exchange:
    """The server's end of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def send_head(self, status: int, headers: Mapping[str, str]) -> None:
        lines = [f"HTTP/1.1 {status} Whatever", *(f"{name}: {value}" for name, value in headers.items())]
        await self.send("\r\n".join([*lines, "", ""]).encode("latin-1"))

    def close(self) -> None:
        """Orderly: what was sent arrives, then the stream ends."""
        self.writer.close()

    def reset(self) -> None:
        """Abruptly: the client sees ECONNRESET."""
        raw: socket.socket = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Behaviour = Callable[[Received, Exchange], Awaitable[None]]


def respond(status: int = 200, headers: Mapping[str, str] | None = None, body: bytes = b"{}") -> Behaviour:
    return respond_with(lambda _: Canned(status=status, headers=headers or {}, body=body))


def respond_with(answer: Callable[[Received], Canned]) -> Behaviour:
    async def behave(request: Received, exchange: Exchange) -> None:
        canned = answer(request)
        await exchange.send_head(canned.status, {**canned.headers, "Content-Length": str(len(canned.body))})
        await exchange.send(canned.body)

    return behave


def redirect(location: str, status: int = 307) -> Behaviour:
    return respond(status, {"Location": location}, b"")


def hang() -> Behaviour:
    """Never answers."""

    async def behave(request: Received, exchange: Exchange) -> None:
        await asyncio.Event().wait()

    return behave


def drip(data: bytes, head: Mapping[str, str] | None = None, interval: float = 0.01) -> Behaviour:
    """Sends *data* byte by byte and over again, for ever; after a response head if one is given."""

    async def behave(request: Received, exchange: Exchange) -> None:
        if head is not None:
            await exchange.send_head(200, head)
        while True:
            for byte in data:
                await exchange.send(bytes([byte]))
                await asyncio.sleep(interval)

    return behave


def drip_headers() -> Behaviour:
    async def behave(request: Received, exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\n")
        await drip(b"X-Filler: x\r\n")(request, exchange)

    return behave


def drip_body() -> Behaviour:
    return drip(b" ", {"Content-Length": "1000000"})


def stall_body() -> Behaviour:
    """Half a body, then silence."""

    async def behave(request: Received, exchange: Exchange) -> None:
        await exchange.send_head(200, {"Content-Length": "100"})
        await exchange.send(b"x" * 50)
        await asyncio.Event().wait()

    return behave


def huge_body(announced: bool = False) -> Behaviour:
    """A body without end; with *announced*, it says so in its `Content-Length`."""

    async def behave(request: Received, exchange: Exchange) -> None:
        chunk = b"x" * 65536
        if announced:
            await exchange.send_head(200, {"Content-Length": str(2**40)})
        else:
            await exchange.send_head(200, {"Transfer-Encoding": "chunked"})
            chunk = b"10000\r\n" + chunk + b"\r\n"
        while True:
            await exchange.send(chunk)

    return behave


def huge_headers() -> Behaviour:
    """A header block without end."""

    async def behave(request: Received, exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\n")
        while True:
            await exchange.send(b"X-Filler: " + b"x" * 4000 + b"\r\n")

    return behave


def send_raw(data: bytes) -> Behaviour:
    """Sends *data*, whatever it is, and closes."""

    async def behave(request: Received, exchange: Exchange) -> None:
        await exchange.send(data)
        exchange.close()

    return behave


def garbage() -> Behaviour:
    return send_raw(b"\x16\x03\x01 this is no HTTP at all\r\n\r\n")


def close() -> Behaviour:
    """Closes in good order without a byte."""
    return send_raw(b"")


def truncate() -> Behaviour:
    """Closes in good order in the middle of the body."""
    return send_raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b"x" * 50)


def bad_chunk() -> Behaviour:
    """A chunked body whose second chunk has no size."""
    return send_raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\nnonsense\r\n\r\n")


def reset() -> Behaviour:
    """Resets the connection before the response."""

    async def behave(request: Received, exchange: Exchange) -> None:
        exchange.reset()

    return behave


def reset_mid_body() -> Behaviour:
    """Resets the connection in the middle of the body."""

    async def behave(request: Received, exchange: Exchange) -> None:
        await exchange.send_head(200, {"Content-Length": "100"})
        await exchange.send(b"x" * 50)
        exchange.reset()

    return behave


class MisbehavingServer:
    """Serves on 127.0.0.1, on TLS if given a context; counts and records what it is asked.

    `upcoming` holds the behaviours of the next requests; without one, `routes` by path and then `default` decide.
    What `unscripted` has a behaviour for is neither recorded nor counted, and uses up none of `upcoming`.
    """

    def __init__(self, ssl_context: ssl.SSLContext | None = None) -> None:
        self.default: Behaviour = respond()
        self.routes: dict[str, Behaviour] = {}
        self.upcoming: deque[Behaviour] = deque()
        self.unscripted: Callable[[Received], Behaviour | None] = lambda _: None
        self.requests: list[Received] = []
        self.connections = 0
        self.port = 0
        self._ssl_context = ssl_context
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def hits(self) -> int:
        return len(self.requests)

    @property
    def url(self) -> str:
        return self.url_for("127.0.0.1")

    def url_for(self, host: str) -> str:
        return f"{'https' if self._ssl_context else 'http'}://{host}:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self._ssl_context)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Nothing listens on the port any more, and every connection is gone; `start` opens the same port again."""
        if self._server is not None:
            self._server.close()
            for task in self._serving:
                task.cancel()
            await asyncio.gather(*self._serving, return_exceptions=True)
            await self._server.wait_closed()
            self._server = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A plain function, so that asyncio makes no task of its own that logs the cancellation.
        task = asyncio.create_task(self._serve_connection(Exchange(reader, writer)))
        self._serving.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._serving.discard(task)
            if task.cancelled() or task.exception() is not None:
                # It may not have taken a step, or has a bug; nor does it wait for a client that reads no more.
                writer.transport.abort()

        task.add_done_callback(ended)

    async def _serve_connection(self, exchange: Exchange) -> None:
        self.connections += 1
        with suppress(OSError, asyncio.IncompleteReadError):
            while not exchange.writer.is_closing():
                request = await _read_request(exchange.reader)
                if (behaviour := self.unscripted(request)) is None:
                    self.requests.append(request)
                    behaviour = self._choose(request)
                await behaviour(request, exchange)
        exchange.close()

    def _choose(self, request: Received) -> Behaviour:
        if self.upcoming:
            return self.upcoming.popleft()
        return self.routes.get(request.path.partition("?")[0], self.default)


async def _read_request(reader: asyncio.StreamReader) -> Received:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    request_line, *lines = head.rstrip("\r\n").split("\r\n")
    method, path, _ = request_line.split(" ", 2)
    pairs = (line.partition(":") for line in lines)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Received(method=method, path=path, headers=headers, body=body)
