"""Wake-ups, events and cancel requests of one queue on Redis, for the waiters and subscribers of one storage object.

Theory of operation. When the connection breaks every bell rings: what was said meanwhile is unknown, so sleepers look
for themselves. Events of that time are lost, but of a job with a subscriber that has ended by then the end is told, and
whoever listens to cancel requests is told that some may be missing.

Events are heard only while somebody subscribes; the server is told to stop when one arrives that nobody wants any more,
so that waiters coming one after another do not subscribe each anew. Requests to cancel a running job have a channel of
their own besides, for workers: to hear every event would cost them far more than the jobs.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from workers.errors import WorkersError
from workers.homes import keep_inherited
from workers.jobs import JobEventKind
from workers.storage.base import ANY_NAME
from workers.storage.on_redis.listener import RedisListener
from workers.storage.on_redis.server import RedisServer
from workers.storage.subscribers import BufferedSubscription, Subscribers

Event: TypeAlias = tuple[JobEventKind, str]


@dataclass(slots=True, eq=False)
class WaitingClaimer:
    """Rings when a job of one of these names may have become claimable."""

    names: frozenset[bytes]
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class ChannelSubscribers(ABC):
    """What is published about one queue; a layout says on which channels, and in which form."""

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
        """Where sleepers are woken."""

    @property
    @abstractmethod
    def event_channels(self) -> tuple[bytes, ...]:
        """Where events are told."""

    @property
    @abstractmethod
    def cancel_channel(self) -> bytes:
        """Where ids of running jobs are told that somebody wants to cancel."""

    @abstractmethod
    def read_names(self, body: bytes) -> Collection[bytes]:
        """The names that a wake-up is for, none for all."""

    @abstractmethod
    def read_events(self, channel: bytes, body: bytes) -> Iterable[Event]:
        """The events in a message."""

    @abstractmethod
    def read_id(self, body: bytes) -> str:
        """The job that a cancel request is for."""

    @abstractmethod
    async def ends(self, ids: Sequence[str]) -> Sequence[JobEventKind | None]:
        """How each of the jobs ended, None for one that has not."""

    @contextmanager
    def woken(self, names: Collection[str]) -> Iterator[asyncio.Event]:
        """An event that is set when a claim for these names may succeed, until the context ends."""
        woken = WaitingClaimer(frozenset(name.encode() for name in names))
        self._waiting.add(woken)
        try:
            yield woken.woken
        finally:
            self._waiting.discard(woken)

    async def hear_wake_ups(self) -> None:
        """Bells ring from now on.

        Raises:
            StorageUnavailable: the server does not answer.
        """
        await self._listener.hear(*self.wake_channels)

    @asynccontextmanager
    async def subscribe(self, job_id: str | None) -> AsyncIterator[BufferedSubscription]:
        """Events of one job, of every job with None, that happen from now on."""
        self._subscribers += 1
        try:
            await self._listener.hear(*self.event_channels)
            with self._listening.scope(job_id) as subscription:
                yield subscription
        finally:
            self._subscribers -= 1

    @asynccontextmanager
    async def cancel_requests(self) -> AsyncIterator[BufferedSubscription]:
        """Requests to cancel a running job from now on."""
        await self._listener.hear(self.cancel_channel)
        with self._cancels.cancel_requests() as subscription:
            yield subscription

    async def close(self) -> None:
        """Nothing is heard any more."""
        await self._listener.close()
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)

    def forget(self) -> None:
        """The event loop is gone, and its listener, subscribers and waiters with it."""
        keep_inherited(self._listener)
        self._listener = RedisListener(self._server, self, self._name)
        self._subscribers, self._telling = 0, None
        self._listening, self._cancels = Subscribers(), Subscribers()
        self._waiting = set()

    def confirmed(self, channel: bytes) -> None:
        if channel == self.event_channels[0] and self._listening.awaited():
            self._telling = asyncio.create_task(self._tell_ended(), name="redis-notices-tell-ended")

    def connection_lost(self) -> None:
        self._cancels.miss_cancels("the connection on which cancel requests are heard was lost")
        self._ring(())

    def heard(self, channel: bytes, body: bytes) -> bool:
        if channel in self.wake_channels:
            self._ring(self.read_names(body))
        elif channel == self.cancel_channel:
            self._cancels.request_cancel(self.read_id(body))
        elif self._subscribers == 0:
            return False
        else:
            for kind, job_id in self.read_events(channel, body):
                self._listening.publish(kind, job_id)
        return True

    async def _tell_ended(self) -> None:
        """Jobs that ended while nothing was heard are told to have ended."""
        with suppress(WorkersError):  # then the connection will be made once more
            awaited = self._listening.awaited()
            for job_id, end in zip(awaited, await self.ends(awaited), strict=True):
                if end is not None:
                    self._listening.publish(end, job_id)

    def _ring(self, names: Collection[bytes]) -> None:
        """Every bell of these names rings, every bell there is if there are none."""
        for woken in self._waiting:
            if not names or ANY_NAME.encode() in woken.names or not woken.names.isdisjoint(names):
                woken.woken.set()
