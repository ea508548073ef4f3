"""uvicorn, as this application runs it: what a client may hold, and for how long, is bounded.

Theory of operation. A connection is always in one of two phases: it owes us the head of a request, or we owe it an
answer. Each phase has its time, counted from its beginning and not from the last byte, because a client that sends a
header every second, or reads its answers as slowly, would otherwise keep its connection for ever. A connection whose
phase does not end is cut; connections are counted, and the last ones before the limit are still told to come back.

A client that is answered before it has sent its whole body would lose the answer if the connection were closed at once:
what it goes on sending would meet a reset. So only our side is closed, and what still comes is dropped for a moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import cast

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds of one listener.

    Requests are answered 503 from `busy` connections on, and a connection beyond `connections` is cut unheard: by then
    descriptors are needed for the deliveries of the same process. `request` is the time for a request's head, idle
    time before it included, `answer` the time from there to the last byte of the answer; a body's own is shorter.
    `early` is how long a client that still sends has to read an answer after which the connection closes.
    """

    busy: int = 400
    connections: int = 450
    request: timedelta = timedelta(seconds=15)
    answer: timedelta = timedelta(seconds=60)
    early: timedelta = timedelta(seconds=2)


DEFAULT_LIMITS = ConnectionLimits()

# Longer than the four seconds that peers, and we, keep an idle connection for another request.
_KEEPALIVE_SECONDS = 5
_MAX_HEAD_BYTES = 16 * 1024


class NodeServer(uvicorn.Server):
    """Serves the inbound side; the process handles signals, not this."""

    def __init__(self, app: FastAPI, *, grace: timedelta, limits: ConnectionLimits = DEFAULT_LIMITS) -> None:
        # All uvicorn does with the class is to call it.
        protocol = cast("type[asyncio.Protocol]", partial(_BoundedProtocol, limits=limits))
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
        """Accept no more, finish what is being answered; a second request drops that."""
        self.force_exit = self.should_exit
        self.should_exit = True


class _BoundedProtocol(H11Protocol):
    """uvicorn's protocol, which by itself waits for a request's head, and for a slow reader, without end."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ConnectionLimits,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._cut: asyncio.TimerHandle | None = None
        self._drops = False  # whether the last answer is out, and what still comes is of no use

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        self._begin_phase(self._limits.request)
        if len(self.connections) > self._limits.connections:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
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
            self._begin_phase(self._limits.answer)

    def on_response_complete(self) -> None:
        # First, because uvicorn goes on to the next request if that is there already.
        if not self._drops:
            self._begin_phase(self._limits.request)
        super().on_response_complete()

    def _close(self) -> None:
        """The answer is written, and the last one of this connection."""
        if self.conn.their_state is h11.SEND_BODY:
            self._drops = True
            self._begin_phase(self._limits.early)
            self.transport.write_eof()
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        # uvicorn would try to answer in any state, also over an answer of the endpoint's, and log a traceback.
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        super().send_400_response(msg)
        if self.cycle is not None:
            self.cycle.disconnected = True

    def _begin_phase(self, time: timedelta) -> None:
        if self._cut is not None:
            self._cut.cancel()
        self._cut = self.loop.call_later(time.total_seconds(), self.transport.abort)


class _AnswerTransport:
    """What uvicorn writes one answer to; how the connection is closed after it is the protocol's affair."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self.close = close

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)
