"""One connection for many calls at a time.

Theory of operation. A pool lends a connection to one call at a time, and what redis-py does for each loan costs more
than a script of ours. Here every call writes at once, and replies come in the order of the calls, which the protocol
promises. redis-py still makes the connection: address, TLS, log-in, database. Then its transport is handed over, and
replies are read where they arrive.

A call that is given up keeps its place in the line, and its replies are dropped when they come. A server that has said
nothing for some time, and taken nothing, although something was asked, is absent: the connection is closed, and all
calls on it fail. How long an answer takes as a whole depends on its size, and on the line. What blocks, watches keys or
waits for replicas needs a connection of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, cast

import hiredis
from redis import exceptions
from redis.asyncio.connection import AbstractConnection, DefaultParser

from workers.storage.on_redis.master import note_error
from workers.storage.on_redis.wire import Command, Reply, packed

_NOTHING: Final = object()
_LOST: Final = "the connection ended before the answer came"


class _Call:
    """A call's place in the line: its replies so far, and how many it gets."""

    __slots__ = ("answered", "asked", "count", "replies")

    def __init__(self, count: int, answered: asyncio.Future[list[Reply]], asked: float) -> None:
        self.count = count
        self.answered = answered
        self.asked = asked
        self.replies: list[Reply] = []


class SharedConnection(asyncio.Protocol):
    """Takes over a connection that redis-py has made. Replies are `text`, or else bytes.

    The server may be silent for `seconds`. `closed` says that no call may use it any more.
    """

    def __init__(self, connection: AbstractConnection, seconds: float, *, text: bool) -> None:
        self.connection = connection
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        encoding = {"encoding": "utf-8", "errors": "surrogateescape"} if text else {}
        self._replies = hiredis.Reader(
            protocolError=exceptions.InvalidResponse,
            replyError=DefaultParser.parse_error,
            notEnoughData=_NOTHING,
            **encoding,
        )
        self._calls: deque[_Call] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._heard = self._loop.time()
        self._written = 0
        self._sent = 0  # bytes that the system had taken at the last look
        self._writable: asyncio.Future[None] | None = None  # set while the transport's buffer is full
        writer = cast(asyncio.StreamWriter, connection._writer)  # redis-py has no public way to its transport
        self._transport = cast(asyncio.Transport, writer.transport)
        self._former = cast(asyncio.Protocol, self._transport.get_protocol())
        self._transport.set_protocol(self)

    async def ask(self, commands: Sequence[Command]) -> list[Reply]:
        """Run the commands in one round trip, one after the other, and return what each replied.

        Raises:
            redis.exceptions.ConnectionError, TimeoutError: some may have run, some may not.
        """
        while self._writable is not None:
            await asyncio.shield(self._writable)
        if self.closed:
            raise exceptions.ConnectionError(_LOST)
        call = _Call(len(commands), self._loop.create_future(), self._loop.time())
        self._calls.append(call)
        if self._timer is None:
            self._timer = self._loop.call_at(call.asked + self._seconds, self._look_at_the_time)
        data = _packed(commands[0]) if call.count == 1 else b"".join(map(_packed, commands))
        self._written += len(data)
        self._transport.write(data)
        return await call.answered

    async def close_when_answered(self) -> None:
        """Take no more calls, and close it as soon as those under way are over."""
        self.closed = True
        if self._calls:
            await asyncio.wait([call.answered for call in self._calls])
        self._transport.abort()

    def _close(self) -> None:
        """Close it at once; calls that are under way fail."""
        self.closed = True
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        self._replies.feed(data)
        try:
            while (reply := self._replies.gets()) is not _NOTHING:
                self._take(reply)
        except (exceptions.InvalidResponse, IndexError):  # garbage, or an answer to nothing
            self._close()

    def _take(self, reply: Reply) -> None:
        if isinstance(reply, exceptions.RedisError):
            note_error(self.connection, reply)
        call = self._calls[0]
        call.replies.append(reply)
        if len(call.replies) == call.count:
            self._calls.popleft()
            if not call.answered.done():
                call.answered.set_result(call.replies)

    def _look_at_the_time(self) -> None:
        now, self._timer = self._loop.time(), None
        sent = self._written - self._transport.get_write_buffer_size()
        if sent > self._sent:
            self._sent, self._heard = sent, now  # some time since the last look
        if not self._calls:
            return
        ends = max(self._calls[0].asked, self._heard) + self._seconds
        if ends > now:
            self._timer = self._loop.call_at(ends, self._look_at_the_time)
            return
        for call in self._calls:
            if not call.answered.done():
                call.answered.set_exception(TimeoutError())
        self._close()

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._writable is not None:
            self._writable.set_result(None)
            self._writable = None

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.resume_writing()
        if self._timer is not None:
            self._timer.cancel()
        for call in self._calls:
            if not call.answered.done():
                call.answered.set_exception(exceptions.ConnectionError(_LOST))
        self._calls.clear()
        self._former.connection_lost(exc)  # redis-py waits for it when it closes the connection


def _packed(command: Command) -> bytes:
    try:
        return cast(bytes, hiredis.pack_command(cast(Any, command)))  # its types know commands of one part alone
    except UnicodeEncodeError:  # bytes of other producers, as surrogates
        return packed(command)
