"""A port for those who watch a process: as much HTTP as a scraper needs, in the process's own event loop.

It runs in the event loop, so that an answer shows that the loop turns. A connection carries one request, and has a few
seconds for it. If one is too long or too slow it is cut without an answer; if there are too many, or more than half of
them from one client, the one of these is that has been silent for longest (`workers.listening`).
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from typing import Final, TypeAlias

from workers.listening import Acceptor, ConnectionLimits, Connections, EverybodyEnters

MAX_CONNECTIONS: Final = 32
LIMITS: Final = ConnectionLimits(busy=MAX_CONNECTIONS, connections=MAX_CONNECTIONS, per_client=MAX_CONNECTIONS // 2)
MAX_HEAD_BYTES: Final = 8 * 1024
TIMEOUT: Final = timedelta(seconds=5)

_NO_IPV6: Final = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})


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
        self._bound = Connections(LIMITS, EverybodyEnters())
        self._acceptors: list[Acceptor] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, address: str, port: int) -> None:
        """Open the port.

        Raises:
            OSError: the port is taken, or the address is not this machine's.
        """
        listeners = await _listeners(address, port)
        try:
            for listener in listeners:
                self._acceptors.append(Acceptor(listener, self._protocol, bound=self._bound))
        except OSError:
            self._close_port()
            for listener in listeners:
                listener.close()
            raise
        for acceptor in self._acceptors:
            acceptor.start()

    async def close(self) -> None:
        """Close the port, and cut the connections."""
        self._close_port()
        for acceptor in self._acceptors:
            await acceptor.wait_closed()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _close_port(self) -> None:
        for acceptor in self._acceptors:
            acceptor.close()

    def _protocol(self) -> asyncio.Protocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(limit=MAX_HEAD_BYTES), self._begin)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        scrape = _Scrape(writer)
        if not self._bound.admit(scrape, (writer.get_extra_info("peername") or ("",))[0]):
            self._bound.lost(scrape)
            scrape.cut()
            return
        self._bound.rests(scrape)
        task = asyncio.create_task(self._serve(reader, writer, scrape))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, scrape: _Scrape) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                method, path = _request(await reader.readuntil(b"\r\n\r\n"))
                self._bound.asks(scrape)
                writer.write(_response(await self._answer(method, path), with_body=method != "HEAD"))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            scrape.cut()
        except BaseException:
            scrape.cut()
            raise
        finally:
            self._bound.lost(scrape)

    async def _answer(self, method: str, path: str) -> HttpAnswer:
        if not path.startswith("/"):
            return _BAD_REQUEST
        if method not in ("GET", "HEAD"):
            return _NOT_ALLOWED
        return await self._answers(path) or _NOT_FOUND


class _Scrape:
    """One connection."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def cut(self) -> None:
        self._writer.transport.abort()


async def _listeners(address: str, port: int) -> list[socket.socket]:
    """Open the port on every address that the name stands for; on none if one is refused.

    A name stands for addresses of IPv6 even where that is switched off: these are passed over if there are others.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    opened: list[socket.socket] = []
    absent: OSError | None = None
    try:
        for family, *_, at in dict.fromkeys(found):
            try:
                opened.append(socket.create_server(at, family=family))
            except OSError as error:
                if family != socket.AF_INET6 or error.errno not in _NO_IPV6:
                    raise
                absent = error
        if absent is not None and not opened:
            raise absent
    except OSError:
        for listener in opened:
            listener.close()
        raise
    return opened


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
