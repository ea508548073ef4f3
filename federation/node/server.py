"""uvicorn, as this application runs it: what a client may hold, and for how long, is bounded.

Theory of operation. A connection is always in one of two phases: it owes us the head of a request, or we owe it an
answer. Each phase has its time, counted from its beginning and not from the last byte, because a client that sends a
header every second, or reads its answers as slowly, would otherwise keep its connection for ever. A connection whose
phase does not end is cut; connections are counted, and the last ones before the limit are still told to come back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
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
    """

    busy: int = 400
    connections: int = 450
    request: timedelta = timedelta(seconds=15)
    answer: timedelta = timedelta(seconds=60)


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

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        self._begin_phase(self._limits.request)
        if len(self.connections) > self._limits.connections:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._cut is not None:
            self._cut.cancel()

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._begin_phase(self._limits.answer)

    def on_response_complete(self) -> None:
        # First, because uvicorn goes on to the next request if that is there already.
        self._begin_phase(self._limits.request)
        super().on_response_complete()

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
