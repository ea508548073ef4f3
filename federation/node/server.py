"""uvicorn, as this application runs it: what a client may hold, and for how long, is bounded.

Theory of operation. A connection is always in one of two phases: it owes us the head of a request, or we owe it an
answer. Each phase has a time limit, counted from its beginning and not from the last byte: otherwise a client that
sends a header every second, or reads its answers as slowly, would keep its connection for ever. When a phase exceeds
its limit, the connection is cut.

Connections are counted, in all and by client. If there are too many, the one that has owed us a head for longest is
cut: a silent client keeps nobody out, and one that sends its request at once gets in. Only if all are being answered,
the last ones before the limit are told to come back, and those beyond it are cut.

A client that is answered before it has sent its whole body would lose the answer if the connection were closed at once:
what it goes on sending would meet a reset. So only our side is closed, and what still comes is dropped for a moment.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from http import HTTPStatus
from typing import Final, cast

import h11
import uvicorn
from fastapi import FastAPI
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from federation.node.clients import Clients, ClientStanding, turned_away


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds of one listener.

    From `busy` connections on, each new one cuts the one that has been without a head for longest. If there is none,
    requests are answered 503, and a connection beyond `connections` is cut without an answer: by then the deliveries of
    the same process need the descriptors. One client may have `per_client` connections. `request` is the time for a
    request's head, including idle time before it; `answer` is the time from there to the last byte of the answer; the
    time for a body is shorter. `early` is how long a client that still sends has to read an answer after which the
    connection closes. `barred` is the same for a client that was turned away at once, of which there may be hundreds a
    second.
    """

    busy: int = 400
    connections: int = 450
    per_client: int = 64
    request: timedelta = timedelta(seconds=15)
    answer: timedelta = timedelta(seconds=60)
    early: timedelta = timedelta(seconds=2)
    barred: timedelta = timedelta(milliseconds=500)


DEFAULT_LIMITS = ConnectionLimits()

# Longer than the four seconds for which peers, and we, keep an idle connection for another request.
_KEEPALIVE_SECONDS = 5
_MAX_HEAD_BYTES = 16 * 1024
_READ_BYTES: Final = 64 * 1024
"""The size of one read of a socket. So much of a body may be held before it is decided whether to read it."""
_FRAMINGS: Final = frozenset({b"content-length", b"transfer-encoding"})


def _written(response: Response) -> bytes:
    """Return the bytes of the response on a connection that closes after it."""
    head = [b"HTTP/1.1 %d %s" % (response.status_code, HTTPStatus(response.status_code).phrase.encode())]
    head += [b"%s: %s" % header for header in [*response.raw_headers, (b"connection", b"close")]]
    return b"\r\n".join([*head, b"", bytes(response.body)])


_TURNED_AWAY: Final = _written(turned_away().response())


class Connections:
    """The connections of one listener.

    A proxy that *clients* trusts has no limit of its own: it stands for many clients.
    """

    def __init__(self, limits: ConnectionLimits, clients: Clients, standing: ClientStanding) -> None:
        self._limits = limits
        self._names = clients
        self._standing = standing
        self._clients: dict[_BoundedProtocol, str | None] = {}
        self._count: Counter[str | None] = Counter()
        self._idle: dict[_BoundedProtocol, None] = {}  # the one that has been idle for longest first

    def admit(self, connection: _BoundedProtocol) -> bool:
        """Count *connection* until it is `lost`, and return whether there is room for it."""
        client = self._names.of_connection(connection.client[0] if connection.client else "")
        self._clients[connection] = client
        self._count[client] += 1
        if client is not None and self._count[client] > self._limits.per_client:
            return self._cut(each for each in self._idle if self._clients[each] == client)
        if len(self._clients) >= self._limits.busy:
            self._cut(iter(self._idle))
        return len(self._clients) <= self._limits.connections

    def turns_away(self, connection: _BoundedProtocol) -> bool:
        """Tell whether its client has to come back later; see `ClientStanding`."""
        return self._standing.turns_away(self._clients[connection])

    def rests(self, connection: _BoundedProtocol) -> None:
        """Note that we owe *connection* nothing from now on: it is before a head, or after its last answer."""
        self._idle.pop(connection, None)
        self._idle[connection] = None

    def asks(self, connection: _BoundedProtocol) -> None:
        """Note that we owe *connection* an answer from now on."""
        self._idle.pop(connection, None)

    def lost(self, connection: _BoundedProtocol) -> None:
        """Stop counting the connection. Repeating it does nothing."""
        self._idle.pop(connection, None)
        if connection not in self._clients:
            return
        client = self._clients.pop(connection)
        self._count[client] -= 1
        if not self._count[client]:
            del self._count[client]

    def _cut(self, candidates: Iterator[_BoundedProtocol]) -> bool:
        """Cut the first of the candidates. Return False if there is none."""
        connection = next(candidates, None)
        if connection is None:
            return False
        self.lost(connection)
        connection.transport.abort()
        return True


class NodeServer(uvicorn.Server):
    """Serves the inbound side. The process handles signals, not this server."""

    def __init__(
        self,
        app: FastAPI,
        *,
        grace: timedelta,
        limits: ConnectionLimits = DEFAULT_LIMITS,
        clients: Clients | None = None,
        standing: ClientStanding | None = None,
    ) -> None:
        connections = Connections(limits, clients or Clients(), standing or ClientStanding())
        # uvicorn does nothing with the class but call it.
        protocol = cast("type[asyncio.Protocol]", partial(_BoundedProtocol, limits=limits, bound=connections))
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
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

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

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
        self._drops = False  # whether the last answer is out, so that what still comes is dropped

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        transport.max_size = _READ_BYTES  # type: ignore[attr-defined] # of asyncio's own transports
        if not self._bound.admit(self):
            transport.abort()
        elif self._bound.turns_away(self):
            self._turn_away()
        else:
            self._await_head()

    def _turn_away(self) -> None:
        """Answer without having read anything. What is sent meanwhile stays in the sender's kernel, and ours."""
        self._drops = True
        self._bound.rests(self)
        self.transport.pause_reading()
        self.transport.write(_TURNED_AWAY)
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
            self.cycle.transport = cast("asyncio.Transport", _AnswerTransport(self.transport, self._close))
            self._bound.asks(self)
            self._begin_phase(self._limits.answer)

    def on_response_complete(self) -> None:
        # This comes first, because uvicorn goes on to the next request if that is there already.
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

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self.close = close

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)
