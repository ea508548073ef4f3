"""What open pages show as it changes: one reader for a whole process, however many pages are open.

Theory of operation. A page listens to a topic, with its parameters. The topic's fragments, HTML by the id of an
element, are read by one task, again and again while somebody listens, and only once for all who listen to the same.
After a reading that took long there is a long pause, so that reading stays a small part of the time. Only fragments
that changed are passed on. What a listener has not taken yet is replaced by what is newer: a slow one misses steps in
between, and holds no more memory than one page.

A topic that cannot be read, because its database is away, says so in a fragment of its own, which is empty again as
soon as it can be read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, TypeAlias

from starlette.types import Message, Receive, Scope, Send

from workers.clock import monotonic

INTERVAL: Final = timedelta(seconds=2)
SHARE: Final = 50
"""A reading is followed by a pause of at least so many times the time it took."""
MOST_LISTENERS: Final = 64
PATIENCE: Final = timedelta(seconds=10)
TROUBLE: Final = "trouble"
"""The id of the element that says what is wrong."""

Parameters: TypeAlias = tuple[tuple[str, str], ...]
Fragments: TypeAlias = Mapping[str, str]
LiveSource: TypeAlias = Callable[[Parameters], Awaitable[Fragments]]
Tell: TypeAlias = Callable[[Exception], str | None]
"""Returns the HTML that says what is wrong; None for what is a fault of ours."""

log = logging.getLogger(__name__)


class FeedFull(Exception):
    """So many pages listen that one more would be too many."""


@dataclass(eq=False, slots=True)
class Listener:
    """One open page: what it has to be told, the newest of each fragment."""

    pending: dict[str, str] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    closed: bool = False

    def put(self, fragments: Fragments) -> None:
        """Add what is new."""
        if fragments:
            self.pending.update(fragments)
            self.changed.set()

    async def take(self) -> Fragments | None:
        """Return what is new, waiting for it; None when there will be nothing more."""
        await self.changed.wait()
        if self.closed:
            return None
        self.changed.clear()
        taken, self.pending = self.pending, {}
        return taken

    def close(self) -> None:
        self.closed = True
        self.changed.set()


@dataclass(eq=False, slots=True)
class _Topic:
    source: LiveSource
    parameters: Parameters
    listeners: set[Listener] = field(default_factory=set)
    last: dict[str, str] = field(default_factory=dict)
    due: float = 0.0

    def tell(self, fragments: Fragments) -> None:
        news = {id_: html for id_, html in fragments.items() if self.last.get(id_) != html}
        self.last.update(news)
        for listener in self.listeners:
            listener.put(news)


class Feed:
    """Reads what pages listen to. It reads nothing while nobody does."""

    def __init__(
        self,
        sources: Mapping[str, LiveSource],
        *,
        tell: Tell,
        interval: timedelta = INTERVAL,
        most_listeners: int = MOST_LISTENERS,
    ) -> None:
        self._sources = sources
        self._tell = tell
        self._interval = interval.total_seconds()
        self._most = most_listeners
        self._topics: dict[tuple[str, Parameters], _Topic] = {}
        self._reading: asyncio.Task[None] | None = None
        self._closed = False
        self._warm: set[LiveSource] = set()

    @asynccontextmanager
    async def listen(self, name: str, parameters: Parameters = ()) -> AsyncIterator[Listener]:
        """Listen to a topic. Its first fragments are those of the last reading, if others listen already.

        Raises:
            LookupError: there is no such topic.
            FeedFull: too many listen.
        """
        if name not in self._sources:
            raise LookupError(name)
        if self._closed or sum(len(topic.listeners) for topic in self._topics.values()) >= self._most:
            raise FeedFull
        key, listener = (name, parameters), Listener()
        topic = self._topics.setdefault(key, _Topic(self._sources[name], parameters))
        topic.listeners.add(listener)
        listener.put(topic.last)
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read(), name="dashboard-feed")
        try:
            yield listener
        finally:
            topic.listeners.discard(listener)
            if not topic.listeners:
                self._topics.pop(key, None)

    async def close(self) -> None:
        """End every stream, and read no more."""
        self.end_streams()
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading

    def end_streams(self) -> None:
        """Tell every page that there will be nothing more."""
        self._closed = True
        for topic in self._topics.values():
            for listener in topic.listeners:
                listener.close()

    async def _read(self) -> None:
        while self._topics and not self._closed:
            now = monotonic()
            for topic in [*self._topics.values()]:
                if topic.due <= now and topic.listeners:
                    await self._read_topic(topic)
            earliest = min((topic.due for topic in self._topics.values()), default=now)
            # Short enough that a page which opens meanwhile need not wait for the others' pause.
            await asyncio.sleep(min(max(earliest - monotonic(), 0.02), self._interval, 0.25))

    async def _read_topic(self, topic: _Topic) -> None:
        began = monotonic()
        try:
            async with asyncio.timeout(PATIENCE.total_seconds()):
                topic.tell({TROUBLE: "", **await topic.source(topic.parameters)})
        except Exception as error:  # it must not end the reading of the other topics
            told = self._tell(error)
            if told is None:
                log.exception("dashboard_topic_failed")
            topic.tell({TROUBLE: told or "This page cannot be brought up to date: see the log of the dashboard."})
        took = monotonic() - began if topic.source in self._warm else 0  # the first one compiles templates
        self._warm.add(topic.source)
        topic.due = monotonic() + max(self._interval, SHARE * took)


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
