"""A port for those who watch a process: as much HTTP as a scraper needs, in the process's own event loop.

It runs in the event loop, so that an answer shows that the loop turns. A connection carries one request, and has a few
seconds for it. If one is too long or too slow, or there are too many, it is cut without an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from typing import Final, TypeAlias

MAX_CONNECTIONS: Final = 32
MAX_HEAD_BYTES: Final = 8 * 1024
TIMEOUT: Final = timedelta(seconds=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """A response, independent of what sends it."""

    status: int
    content_type: str
    body: bytes


Answers: TypeAlias = Callable[[str], Awaitable[HttpAnswer | None]]
"""Answers a GET of a path, or returns None if there is nothing at that path."""

_NOT_FOUND: Final = HttpAnswer(status=404, content_type="text/plain", body=b"not found\n")
_NOT_ALLOWED: Final = HttpAnswer(status=405, content_type="text/plain", body=b"only GET and HEAD\n")
_BAD_REQUEST: Final = HttpAnswer(status=400, content_type="text/plain", body=b"not a request\n")


class HttpPort:
    """Serves `answers` on a port from `start` until `close`."""

    def __init__(self, answers: Answers, *, timeout: timedelta = TIMEOUT) -> None:
        self._answers = answers
        self._timeout = timeout.total_seconds()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, address: str, port: int) -> None:
        """Open the port.

        Raises:
            OSError: the port is taken, or the address is not this machine's.
        """
        self._server = await asyncio.start_server(self._accept, address, port, limit=MAX_HEAD_BYTES)

    async def close(self) -> None:
        """Close the port, and cut the connections."""
        if self._server is None:
            return
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                method, path = _request(await reader.readuntil(b"\r\n\r\n"))
                writer.write(_response(await self._answer(method, path), with_body=method != "HEAD"))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            writer.transport.abort()
        except BaseException:
            writer.transport.abort()
            raise

    async def _answer(self, method: str, path: str) -> HttpAnswer:
        if not path.startswith("/"):
            return _BAD_REQUEST
        if method not in ("GET", "HEAD"):
            return _NOT_ALLOWED
        return await self._answers(path) or _NOT_FOUND


def _request(head: bytes) -> tuple[str, str]:
    """Return the method and the path without its query, or empty strings if it is no request."""
    parts = head.partition(b"\r\n")[0].decode("latin-1").split(" ")
    return (parts[0], parts[1].partition("?")[0]) if len(parts) == 3 else ("", "")


def _response(answer: HttpAnswer, *, with_body: bool) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\n"
        "Cache-Control: no-store\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (answer.body if with_body else b"")
