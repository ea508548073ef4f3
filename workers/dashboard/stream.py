"""Server-sent events: an answer that goes on for as long as its page is open.

A browser that takes nothing more is dropped: each event has a few seconds to leave this process. Its connection is cut
by the kernel (`serving.listen`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import Final

from starlette.types import Message, Receive, Scope, Send

from workers.dashboard.feed import FeedFull, Fragments, Listener

SEND_PATIENCE: Final = timedelta(seconds=15)
HEARTBEAT: Final = timedelta(seconds=20)
"""How often a quiet stream says that it is still there; so a browser that has gone is noticed as well."""
_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)


class EventStream:
    """The answer to one page that listens: an ASGI application."""

    def __init__(
        self, listening: AbstractAsyncContextManager[Listener], *, patience: timedelta = SEND_PATIENCE
    ) -> None:
        self._listening = listening
        self._patience = patience.total_seconds()

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the browser leaves, takes no more, or the dashboard stops."""
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(self._send(send))
            leaving = group.create_task(gone(receive))
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            sending.cancel()
            leaving.cancel()

    async def _send(self, send: Send) -> None:
        async def sent(message: Message) -> None:
            async with asyncio.timeout(self._patience):
                await send(message)

        try:
            async with self._listening as listener:
                await sent({"type": "http.response.start", "status": 200, "headers": [*_HEADERS]})
                async for event in _events(listener):
                    await sent({"type": "http.response.body", "body": event, "more_body": True})
            await sent({"type": "http.response.body", "body": b"", "more_body": False})
        except FeedFull:
            await sent({"type": "http.response.start", "status": 503, "headers": [(b"retry-after", b"30")]})
            await sent({"type": "http.response.body", "body": b"too many pages are open\n"})
        except (TimeoutError, OSError):
            return  # it takes nothing more


async def _events(listener: Listener) -> AsyncIterator[bytes]:
    yield b"retry: 3000\n\n"
    while True:
        try:
            async with asyncio.timeout(HEARTBEAT.total_seconds()):
                fragments = await listener.take()
        except TimeoutError:
            yield b": still here\n\n"
            continue
        if fragments is None:
            return
        yield _event(fragments)


def _event(fragments: Fragments) -> bytes:
    """Write the fragments as one event. JSON has no line end in it, which would end the event."""
    return f"data: {json.dumps(fragments)}\n\n".encode()


async def gone(receive: Receive) -> None:
    """Return when the client has left, or has all of its answer. What it still sends is dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass
