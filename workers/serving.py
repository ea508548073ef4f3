"""uvicorn, as we run it wherever we listen: what a client may hold, and for how long, is bounded.

Theory of operation. A connection is always in one of two phases: it owes us the head of a request, or we owe it an
answer. Each phase has a time limit, counted from its beginning and not from the last byte: otherwise a client that
sends a header every second, or reads its answers as slowly, would keep its connection for ever. When a phase exceeds
its limit, the connection is cut. Only a stream of events has no end to wait for: where there are such, the limit counts
anew whenever something is written and all that was written before has been taken.

How many connections there may be, and which one goes for another, is decided in `workers.listening`.

A client that is answered before it has sent its whole body would lose the answer if the connection were closed at once:
what it goes on sending would meet a reset. So only our side is closed, and what still comes is dropped for a moment.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from workers.listening import (
    Acceptor,
    ConnectionLimits,
    Connections,
    Doorkeeper,
    EverybodyEnters,
    Occasionally,
)

# Longer than the four seconds for which peers, and we, keep an idle connection for another request.
_KEEPALIVE_SECONDS = 5
_MAX_HEAD_BYTES = 16 * 1024
_READ_BYTES: Final = 64 * 1024
"""The size of one read of a socket. So much of a body may be held before it is decided whether to read it."""
_FRAMINGS: Final = frozenset({b"content-length", b"transfer-encoding"})


class _NowAndThen(logging.Filter):
    """Lets the same warning pass once a minute: strangers cause what uvicorn warns of."""

    def __init__(self) -> None:
        super().__init__()
        self._told: dict[str, Occasionally] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        return self._told.setdefault(record.msg, Occasionally()).count() is not None


def _own_logger() -> logging.Logger:
    logger = logging.getLogger("uvicorn.error.connections")
    logger.addFilter(_NowAndThen())
    return logger


_LOGGER: Final = _own_logger()


class BoundedServer(uvicorn.Server):
    """Serves an application on open ports. The process handles signals, not this server."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        grace: timedelta,
        limits: ConnectionLimits,
        doorkeeper: Doorkeeper | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                proxy_headers=False,
                server_header=False,
                limit_concurrency=limits.busy,
                timeout_keep_alive=_KEEPALIVE_SECONDS,
                h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
                timeout_graceful_shutdown=max(1, round(grace.total_seconds())),
            )
        )
        self._limits = limits
        self._bound = Connections(limits, doorkeeper or EverybodyEnters())

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections of the open ports `sockets`."""
        await super().startup(sockets=[])
        for listener in sockets or []:
            acceptor = Acceptor(listener, self._protocol, bound=self._bound)
            acceptor.start()
            self.servers.append(cast("asyncio.Server", acceptor))  # uvicorn closes it, and waits for it

    def _protocol(self) -> asyncio.Protocol:
        return _BoundedProtocol(
            self.config, self.server_state, self.lifespan.state, limits=self._limits, bound=self._bound
        )

    def request_stop(self) -> None:
        """Accept no more connections, and finish what is being answered. A second request drops that, too."""
        self.force_exit = self.should_exit
        self.should_exit = True


class _BoundedConnection(h11.Connection):
    """h11's connection with more bounds.

    By itself h11 bounds only heads that arrive in pieces, and believes one of two contradicting framings of a body.
    """

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.their_state is not h11.IDLE:
            return super().next_event()
        before = len(self.trailing_data[0])
        event = super().next_event()
        if isinstance(event, h11.Request):
            if before - len(self.trailing_data[0]) > _MAX_HEAD_BYTES:
                raise h11.RemoteProtocolError("the head is too long")
            if {name for name, _ in event.headers} >= _FRAMINGS:
                # A proxy before us may have believed the other one: then what follows would be no request.
                raise h11.RemoteProtocolError("content-length together with transfer-encoding")
        return event


class _BoundedProtocol(H11Protocol):
    """uvicorn's protocol with time limits: by itself it waits without end for a request's head, or a slow reader."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ConnectionLimits,
        bound: Connections,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = _BoundedConnection(h11.SERVER, _MAX_HEAD_BYTES)
        self._limits = limits
        self._bound = bound
        self._cut: asyncio.TimerHandle | None = None
        self._answer_by = 0.0
        self._awaits_body = False
        self.logger = _LOGGER
        self._drops = False  # whether the last answer is out, so that what still comes is dropped

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        transport.max_size = _READ_BYTES  # type: ignore[attr-defined] # of asyncio's own transports
        if not self._bound.admit(self, self.client[0] if self.client else ""):
            transport.abort()
        elif (refusal := self._bound.refusal(self)) is not None:
            self._turn_away(refusal)
        else:
            self._await_head()

    def cut(self) -> None:
        """End the connection at once, without an answer."""
        self.transport.abort()

    def _turn_away(self, refusal: bytes) -> None:
        """Answer without having read anything. What is sent meanwhile stays in the sender's kernel, and ours."""
        self._drops = True
        self._bound.rests(self)
        self.transport.pause_reading()
        self.transport.write(refusal)
        self.transport.write_eof()
        self._begin_phase(self._limits.barred)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._bound.lost(self)
        if self._cut is not None:
            self._cut.cancel()

    def data_received(self, data: bytes) -> None:
        if not self._drops:
            super().data_received(data)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not None and self.cycle is not before:
            answered = self._stream_on if self._limits.streams else None
            transport = _AnswerTransport(self.transport, self._close, taken=answered)
            self.cycle.transport = cast("asyncio.Transport", transport)
            self._bound.asks(self)
            self._answer_by = self.loop.time() + self._limits.answer.total_seconds()
            self._awaits_body = self.cycle.more_body
            self._begin_phase(min(self._limits.body, self._limits.answer) if self._awaits_body else self._limits.answer)
        elif self._awaits_body and not self.cycle.more_body:
            self._awaits_body = False
            self._begin_phase(timedelta(seconds=self._answer_by - self.loop.time()))

    def _stream_on(self) -> None:
        """Give the client its time anew: it has taken all that was written so far, and more was."""
        if not self._awaits_body:
            self._begin_phase(self._limits.answer)

    def on_response_complete(self) -> None:
        # This comes first, because uvicorn goes on to the next request if that is there already.
        self._awaits_body = False
        if not self._drops:
            self._await_head()
        super().on_response_complete()

    def _close(self) -> None:
        """Close the connection after its last answer has been written."""
        if self.conn.their_state is h11.SEND_BODY:
            self._drops = True
            self._bound.rests(self)
            self._begin_phase(self._limits.early)
            self.transport.write_eof()
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        # uvicorn would try to answer in any state, even over an answer of the endpoint, and log a traceback.
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        super().send_400_response(msg)
        if self.cycle is not None:
            self.cycle.disconnected = True

    def _await_head(self) -> None:
        self._bound.rests(self)
        self._begin_phase(self._limits.request)

    def _begin_phase(self, time: timedelta) -> None:
        if self._cut is not None:
            self._cut.cancel()
        self._cut = self.loop.call_later(time.total_seconds(), self.transport.abort)


class _AnswerTransport:
    """The transport that uvicorn writes one answer to. The protocol decides how the connection is closed after it."""

    def __init__(
        self, transport: asyncio.Transport, close: Callable[[], None], *, taken: Callable[[], None] | None
    ) -> None:
        self._transport = transport
        self._taken = taken
        self.close = close

    def write(self, data: bytes) -> None:
        """Write, and tell if all before it had been taken."""
        had_taken = not self._transport.get_write_buffer_size()
        self._transport.write(data)
        if self._taken is not None and had_taken and data:
            self._taken()

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)
