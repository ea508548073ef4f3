"""Wake-ups, events and cancel requests of one queue on Redis, for the waiters and subscribers of one storage.

Theory of operation. When the connection breaks, everyone who waits is woken: messages sent meanwhile are unknown, so
waiters look for themselves. The events of that time are lost. But if a job with a subscriber has ended by then, its end
is announced, and those who listen to cancel requests are told that some may be missing.

Events are heard only while somebody subscribes. The server is told to stop when an event arrives that nobody wants any
more, so that waiters who follow each other do not each subscribe anew. Requests to cancel a running job also have a
channel of their own, for workers: hearing every event would cost workers far more than their jobs.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

from workers.errors import WorkersError
from workers.homes import keep_inherited
from workers.jobs import JobEventKind
from workers.storage.base import ANY_NAME
from workers.storage.on_redis.listener import RedisListener
from workers.storage.on_redis.server import RedisServer
from workers.storage.subscribers import BufferedSubscription, Subscribers, Told


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
