"""What is published about one queue.

Theory of operation. When the connection breaks every bell rings: what was said meanwhile is unknown, so sleepers look
for themselves. Events of that time are lost, but of a job with a subscriber that has ended by then the end is told.

Events are heard only while somebody subscribes; the server is told to stop when one arrives that nobody wants any more,
so that waiters coming one after another do not subscribe each anew. Requests to cancel a running job have a channel of
their own besides, for workers: to hear every event would cost them far more than the jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from workers.errors import WorkersError
from workers.jobs import JobEventKind
from workers.storage import redis_inspect
from workers.storage.base import ANY_NAME
from workers.storage.broadcast import Broadcast, BufferedSubscription
from workers.storage.redis_codec import CANCELLED, STATES, unpack
from workers.storage.redis_listener import Listener
from workers.storage.redis_lua import QueueScripts
from workers.storage.redis_server import Reply

KINDS: Final[Mapping[int, JobEventKind]] = {
    1: JobEventKind.QUEUED,
    2: JobEventKind.ACTIVE,
    3: JobEventKind.COMPLETED,
    4: JobEventKind.FAILING,
    5: JobEventKind.FAILED,
    6: JobEventKind.CANCELLED,
    7: JobEventKind.CANCEL_REQUESTED,
    8: JobEventKind.PROGRESS,
}


@dataclass(slots=True, eq=False)
class Bell:
    """Rings when a job of one of these names may have become claimable."""

    names: frozenset[bytes]
    rung: asyncio.Event = field(default_factory=asyncio.Event)


class Notices:
    """The wake-ups and events of one queue, for the waiters and subscribers of one storage object."""

    def __init__(self, queue: QueueScripts) -> None:
        self._queue = queue
        self._listener = Listener(queue.server, self, repr(queue.base))
        self._broadcast = Broadcast()
        self._subscribers = 0
        self._cancels = Broadcast()
        self._bells: set[Bell] = set()
        self._telling: asyncio.Task[None] | None = None

    @contextmanager
    def bell(self, names: Collection[str]) -> Iterator[asyncio.Event]:
        """An event that is set when a claim for these names may succeed, until the context ends."""
        bell = Bell(frozenset(name.encode() for name in names))
        self._bells.add(bell)
        try:
            yield bell.rung
        finally:
            self._bells.discard(bell)

    async def hear_wake_ups(self) -> None:
        """Bells ring from now on.

        Raises:
            StorageUnavailable: the server does not answer.
        """
        await self._listener.hear(self._queue.channels[0])

    @asynccontextmanager
    async def subscribe(self, job_id: str | None) -> AsyncIterator[BufferedSubscription]:
        """Events of one job, of every job with None, that happen from now on."""
        self._subscribers += 1
        try:
            await self._listener.hear(self._queue.channels[1])
            with self._broadcast.scope(job_id) as subscription:
                yield subscription
        finally:
            self._subscribers -= 1

    @asynccontextmanager
    async def cancel_requests(self) -> AsyncIterator[BufferedSubscription]:
        """Requests to cancel a running job from now on."""
        await self._listener.hear(self._queue.channels[2])
        with self._cancels.cancel_requests() as subscription:
            yield subscription

    async def close(self) -> None:
        """Nothing is heard any more."""
        await self._listener.close()
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)

    def confirmed(self, channel: bytes) -> None:
        if channel == self._queue.channels[1] and self._broadcast.awaited():
            self._telling = asyncio.create_task(self._tell_ended(), name="redis-notices-tell-ended")

    def deafened(self) -> None:
        self._ring(())

    def heard(self, channel: bytes, body: bytes) -> bool:
        wake, _, cancels = self._queue.channels
        if channel == wake:
            self._ring(unpack(body))
        elif channel == cancels:
            self._cancels.request_cancel(body.decode())
        elif self._subscribers == 0:
            return False
        else:
            self._tell(unpack(body))
        return True

    async def _tell_ended(self) -> None:
        """Jobs that ended while nothing was heard are told to have ended."""
        with suppress(WorkersError):  # then the connection will be made once more
            awaited = self._broadcast.awaited()
            ends = await redis_inspect.ends(self._queue, [job_id.encode() for job_id in awaited])
            for job_id, end in zip(awaited, ends, strict=True):
                if end:
                    kind = JobEventKind.CANCELLED if end[0] == CANCELLED else JobEventKind(STATES[end[0]])
                    self._broadcast.publish(kind, job_id)

    def _ring(self, names: Collection[bytes]) -> None:
        """Every bell of these names rings, every bell there is if there are none."""
        for bell in self._bells:
            if not names or ANY_NAME.encode() in bell.names or not bell.names.isdisjoint(names):
                bell.rung.set()

    def _tell(self, events: list[Reply]) -> None:
        for kind, job_id in zip(events[::2], events[1::2], strict=True):
            if kind in KINDS:
                self._broadcast.publish(KINDS[kind], job_id.decode())
