"""A small HTTP server on a free port of loopback, which misbehaves when it is told to.

Theory of operation. It lives in one event loop. A socket that never listens keeps the port while the server is away:
whoever connects then is refused, as by a machine on which nothing runs. Closing cancels what hangs.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

MOST_OF_HEAD: Final = 64 * 1024
MOST_OF_BODY: Final = 4 * 1024 * 1024
DRIP_SECONDS: Final = 0.05
HOST: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRequest:
    """A request as it arrived. `target` is the path with its query; the names of headers are in lower case."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes = field(repr=False)

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


@dataclass(frozen=True, slots=True)
class RemoteAnswer:
    """An answer: `RemoteAnswer(429, {"Retry-After": "60"})`."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = field(default=b"", repr=False)


class Trouble(StrEnum):
    """What a server does in place of an answer."""

    HANGS = "hangs"
    """It reads the request, and says nothing."""
    DRIPS = "drips"
    """It answers 200 at once, and sends a body byte by byte, without end."""
    RESETS = "resets"
    """It resets the connection."""


Respond: TypeAlias = Callable[[RemoteRequest], Awaitable[RemoteAnswer | Trouble]]


class Loopback:
    """The server; *respond* is called with each request."""

    def __init__(self, respond: Respond) -> None:
        self._respond = respond
        self._kept = _bound(0)
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._kept.getsockname()[1]}"

    async def open(self) -> None:
        """Listen; once it does, this does nothing."""
        if self._server is None:
            listener = _bound(self._kept.getsockname()[1])
            self._server = await asyncio.start_server(self._serve, sock=listener, limit=MOST_OF_HEAD)

    async def leave(self) -> None:
        """Refuse connections from now on, and end those that there are."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        ended = list(self._connections)
        for task, writer in self._connections.items():
            writer.transport.abort()
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)
        if server is not None:
            await server.wait_closed()

    async def close(self) -> None:
        """Leave, and give the port back."""
        await self.leave()
        self._kept.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._server is None:  # it has left since the connection was accepted, and not known of this one
            writer.transport.abort()
            return
        self._connections[task] = writer
        # A client that goes away, or sends no HTTP, ends its own connection only. The server that leaves cancels this
        # task, which nobody waits for: asyncio would log it.
        ends = (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError)
        try:
            with suppress(*ends):
                is_open = True
                while is_open:
                    is_open = await self._exchange(reader, writer)
        finally:
            del self._connections[task]
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request. Return whether there may be another one."""
        request = await _read(reader)
        answer = await self._respond(request)
        match answer:
            case Trouble.HANGS:
                await reader.read(1)  # until the other side gives up
            case Trouble.RESETS:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()
            case Trouble.DRIPS:
                writer.write(_head(200, {"Content-Length": str(MOST_OF_BODY)}))
                while True:
                    writer.write(b" ")
                    await writer.drain()
                    await asyncio.sleep(DRIP_SECONDS)
            case RemoteAnswer():
                body = b"" if request.method == "HEAD" else answer.body
                writer.write(_head(answer.status, {**answer.headers, "Content-Length": str(len(answer.body))}) + body)
                await writer.drain()
                return True
        return False


def _bound(port: int) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so that one may listen where the other keeps
    bound.bind((HOST, port))
    return bound


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} ", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1")


async def _read(reader: asyncio.StreamReader) -> RemoteRequest:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ")
    headers: dict[str, str] = {}
    for line in filter(None, lines):
        name, _, value = line.partition(":")
        name = name.strip().lower()
        headers[name] = f"{headers[name]}, {value.strip()}" if name in headers else value.strip()
    length = int(headers.get("content-length", "0"))
    if not 0 <= length <= MOST_OF_BODY:
        raise ValueError("the body is too long")
    return RemoteRequest(method=method, target=target, headers=headers, body=await reader.readexactly(length))
