"""Wake-ups, events and cancel requests of one queue on Redis, for the waiters and subscribers of one storage.

Theory of operation. When the connection breaks, everyone who waits is woken: messages sent meanwhile are unknown, so
waiters look for themselves. The events of that time are lost. But if a job with a subscriber has ended by then, its end
is announced, and those who listen to cancel requests are told that some may be missing.

Events are heard only while somebody subscribes. The server is told to stop when an event arrives that nobody wants any
more, so that waiters who follow each other do not each subscribe anew. Requests to cancel a running job also have a
channel of their own, for workers: hearing every event would cost workers far more than their jobs.

The connection that listens is made when somebody first wants to hear a channel, and stays until `close`. A channel
counts as heard once the server has confirmed it on the connection in use. When the connection breaks, it is made again.
A connection that died silently is noticed by an unanswered ping.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

from redis.asyncio.connection import AbstractConnection

from workers.errors import StorageUnavailable, WorkersError
from workers.homes import keep_inherited
from workers.jobs import JobEventKind
from workers.retry import Backoff
from workers.storage.base import ANY_NAME
from workers.storage.on_redis.errors import translated
from workers.storage.on_redis.master import is_outdated
from workers.storage.on_redis.server import RedisServer
from workers.storage.on_redis.wire import Reply
from workers.storage.subscribers import BufferedSubscription, Subscribers, Told

PING_SECONDS: Final = 5.0
FIRST_PAUSE_SECONDS: Final = 0.05
LONGEST_PAUSE_SECONDS: Final = 2.0


class ChannelSubscriber(Protocol):
    """Gets what the listener hears. It is called in the listener's event loop; it must be quick and never raise."""

    def confirmed(self, channel: bytes) -> None:
        """Note that what is published on the channel is heard from now on."""

    def heard(self, channel: bytes, body: bytes) -> bool:
        """Take what somebody published; return False if the channel need not be heard any more."""

    def connection_lost(self) -> None:
        """Note that the connection broke: what was published since the last message is unknown."""


class RedisListener:
    """Listens to channels of one server for one subscriber."""

    def __init__(self, server: RedisServer, subscriber: ChannelSubscriber, name: str) -> None:
        self._server = server
        self._subscriber = subscriber
        self._name = name
        self._reader: asyncio.Task[None] | None = None
        self._connection: AbstractConnection | None = None
        self._wanted: set[bytes] = set()  # channels to be heard; written by callers, read by the reader
        self._heard: dict[bytes, asyncio.Event] = {}  # set while the server has confirmed the channel
        self._failure: asyncio.Future[WorkersError] | None = None  # done when the connection breaks, or cannot be made
        self._hurry = asyncio.Event()  # somebody waits for the connection
        self._messages = 0  # how many came, ever; counted by the reader, read by its watch

    async def hear(self, *channels: bytes) -> None:
        """Make sure that what is published on the channels is heard from now on.

        Raises:
            StorageUnavailable: the server does not answer, or does not let our user listen, which the message tells.
        """
        failure = self._start()
        missing = [heard for heard in (self._confirmation(channel) for channel in channels) if not heard.is_set()]
        if not missing:
            return
        fresh = [channel for channel in channels if channel not in self._wanted]
        self._wanted.update(fresh)
        if fresh and self._connection is not None:
            await self._send(self._connection, "SUBSCRIBE", *fresh)
        self._hurry.set()
        confirmed = asyncio.ensure_future(_all_set(missing))
        try:
            tasks = (confirmed, failure)
            await asyncio.wait(tasks, timeout=self._server.timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            confirmed.cancel()
        if not all(heard.is_set() for heard in missing):
            cause = failure.result() if failure.done() else None
            why = "" if cause is None or isinstance(cause, StorageUnavailable) else f": {cause}"
            raise StorageUnavailable(f"the Redis server did not confirm a subscription{why}") from cause

    async def close(self) -> None:
        """Stop listening."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def _confirmation(self, channel: bytes) -> asyncio.Event:
        return self._heard.setdefault(channel, asyncio.Event())

    def _start(self) -> asyncio.Future[WorkersError]:
        """Start the reader in this event loop, unless it runs, and return the future of its next failure."""
        loop = asyncio.get_running_loop()
        if self._reader is None or self._reader.done() or self._reader.get_loop() is not loop:
            self._wanted, self._heard, self._connection = set(), {}, None
            self._failure, self._hurry = loop.create_future(), asyncio.Event()
            self._reader = loop.create_task(self._read(), name=f"redis-listener-{self._name}")
        assert self._failure is not None
        return self._failure

    async def _send(self, connection: AbstractConnection, *command: str | bytes) -> None:
        with translated():
            await connection.send_packed_command(connection.pack_command(*command))

    async def _read(self) -> None:
        backoff = Backoff(first=FIRST_PAUSE_SECONDS, longest=LONGEST_PAUSE_SECONDS)
        while True:
            try:
                async with self._server.connection() as connection:
                    try:
                        await self._send(connection, "SUBSCRIBE", *self._wanted)
                        self._connection = connection
                        backoff.reset()
                        await self._listen(connection)
                    finally:
                        # It is still subscribed, so it must not go back to the pool.
                        self._connection = None
                        await connection.disconnect(nowait=True)
            except WorkersError as error:
                self._fail(error)
            with suppress(TimeoutError):
                async with asyncio.timeout(backoff.pause()):
                    await self._hurry.wait()

    def _fail(self, error: WorkersError) -> None:
        """Mark every channel as unheard, and tell everybody why."""
        self._hurry.clear()
        for heard in self._heard.values():
            heard.clear()
        assert self._failure is not None
        self._failure.set_result(error)
        self._failure = asyncio.get_running_loop().create_future()
        self._subscriber.connection_lost()

    async def _listen(self, connection: AbstractConnection) -> None:
        """Take messages until the connection breaks or a ping is not answered."""
        watching = asyncio.create_task(self._watch(connection), name="redis-listener-watch")
        try:
            while True:
                with translated():
                    message = await connection.read_response()
                self._messages += 1
                await self._take(connection, message)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self, connection: AbstractConnection) -> None:
        """Close a connection that has gone dead, or goes to a server that was replaced.

        The reader would wait there for ever.
        """
        while True:
            messages = self._messages
            await asyncio.sleep(PING_SECONDS)
            if is_outdated(connection):
                await connection.disconnect(nowait=True)
                return
            if self._messages != messages:
                continue
            with suppress(WorkersError):
                await self._send(connection, "PING")
            await asyncio.sleep(PING_SECONDS)
            if self._messages == messages:
                await connection.disconnect(nowait=True)
                return

    async def _take(self, connection: AbstractConnection, message: Reply) -> None:
        match message:
            case [b"subscribe", channel, _] if channel in self._wanted:
                self._confirmation(channel).set()
                self._subscriber.confirmed(channel)
            case [b"message", channel, body] if channel in self._wanted and not self._subscriber.heard(channel, body):
                self._wanted.discard(channel)
                self._heard.pop(channel).clear()
                with suppress(WorkersError):
                    await self._send(connection, "UNSUBSCRIBE", channel)


async def _all_set(events: list[asyncio.Event]) -> None:
    for event in events:
        await event.wait()


@dataclass(slots=True, eq=False)
class WaitingClaimer:
    """Rings when a job with one of these names may have become claimable."""

    names: frozenset[bytes]
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class ChannelSubscribers(ABC):
    """The messages published about one queue; a layout says on which channels, and in which form."""

    def __init__(self, server: RedisServer, name: str) -> None:
        self._server, self._name = server, name
        self._listener = RedisListener(server, self, name)
        self._listening = Subscribers()
        self._subscribers = 0
        self._cancels = Subscribers()
        self._waiting: set[WaitingClaimer] = set()
        self._telling: asyncio.Task[None] | None = None

    @property
    @abstractmethod
    def wake_channels(self) -> tuple[bytes, ...]:
        """The channels on which sleepers are woken."""

    @property
    @abstractmethod
    def event_channels(self) -> tuple[bytes, ...]:
        """The channels on which events are announced."""

    @property
    @abstractmethod
    def cancel_channel(self) -> bytes:
        """The channel for the ids of running jobs that somebody wants to cancel."""

    @abstractmethod
    def read_names(self, body: bytes) -> Collection[bytes]:
        """Return the names that a wake-up is for; none means all."""

    @abstractmethod
    def read_events(self, channel: bytes, body: bytes) -> Iterable[Told]:
        """Return the events in a message."""

    @abstractmethod
    def read_id(self, body: bytes) -> str:
        """Return the job that a cancel request is for."""

    @abstractmethod
    async def ends(self, ids: Sequence[str]) -> Sequence[JobEventKind | None]:
        """Return how each of the jobs ended, None for one that has not."""

    @contextmanager
    def woken(self, names: Collection[str]) -> Iterator[asyncio.Event]:
        """Make an event that is set when a claim for these names may succeed, until the context ends."""
        waiter = WaitingClaimer(frozenset(name.encode() for name in names))
        self._waiting.add(waiter)
        try:
            yield waiter.woken
        finally:
            self._waiting.discard(waiter)

    async def hear_wake_ups(self) -> None:
        """Wake those who wait from now on.

        Raises:
            StorageUnavailable: the server does not answer.
        """
        await self._listener.hear(*self.wake_channels)

    @asynccontextmanager
    async def subscribe(self, job_id: str | None) -> AsyncIterator[BufferedSubscription]:
        """Subscribe to the events of one job, or of every job with None, from now on."""
        self._subscribers += 1
        try:
            await self._listener.hear(*self.event_channels)
            with self._listening.scope(job_id) as subscription:
                yield subscription
        finally:
            self._subscribers -= 1

    @asynccontextmanager
    async def cancel_requests(self) -> AsyncIterator[BufferedSubscription]:
        """Subscribe to requests to cancel a running job, from now on."""
        await self._listener.hear(self.cancel_channel)
        with self._cancels.cancel_requests() as subscription:
            yield subscription

    async def close(self) -> None:
        """Stop listening."""
        await self._listener.close()
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)

    def forget(self) -> None:
        """Forget the event loop, which is gone with its listener, subscribers and waiters."""
        keep_inherited(self._listener)
        self._listener = RedisListener(self._server, self, self._name)
        self._subscribers, self._telling = 0, None
        self._listening, self._cancels = Subscribers(), Subscribers()
        self._waiting = set()

    def confirmed(self, channel: bytes) -> None:
        if channel == self.event_channels[0] and self._listening.awaited():
            self._telling = asyncio.create_task(self._tell_ended(), name="redis-subscribers-tell-ended")

    def connection_lost(self) -> None:
        self._cancels.miss_cancels("the connection on which cancel requests are heard was lost")
        self._wake(())

    def heard(self, channel: bytes, body: bytes) -> bool:
        if channel in self.wake_channels:
            self._wake(self.read_names(body))
        elif channel == self.cancel_channel:
            self._cancels.request_cancel(self.read_id(body))
        elif self._subscribers == 0:
            return False
        else:
            for told in self.read_events(channel, body):
                self._listening.publish(*told)
        return True

    async def _tell_ended(self) -> None:
        """Announce the ends of jobs that ended while nothing was heard."""
        with suppress(WorkersError):  # the connection will then be made again
            awaited = self._listening.awaited()
            for job_id, end in zip(awaited, await self.ends(awaited), strict=True):
                if end is not None:
                    self._listening.publish(end, job_id)

    def _wake(self, names: Collection[bytes]) -> None:
        """Wake the waiters for these names, or all waiters if there are no names."""
        for waiter in self._waiting:
            if not names or ANY_NAME.encode() in waiter.names or not waiter.names.isdisjoint(names):
                waiter.woken.set()
