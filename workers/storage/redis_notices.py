"""What is published about one queue, heard on one connection of its own.

Theory of operation. The connection is made when somebody first waits or subscribes, and stays until `close`. A channel
counts as heard once the server has confirmed it on the connection in use. When the connection breaks it is made again
and every bell rings: what was said meanwhile is unknown, so sleepers look for themselves. Events of that time are
lost, but of a job with a subscriber that has ended by then the end is told. A line that went dead without a word is
noticed by a ping without answer.

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

from redis.asyncio.connection import AbstractConnection

from workers.errors import StorageUnavailable, WorkersError
from workers.jobs import JobEventKind
from workers.storage import redis_inspect
from workers.storage.base import ANY_NAME
from workers.storage.broadcast import Broadcast, BufferedSubscription
from workers.storage.redis_codec import CANCELLED, STATES, unpack
from workers.storage.redis_lua import QueueScripts
from workers.storage.redis_server import Reply, translated

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

PING_SECONDS: Final = 10.0
FIRST_PAUSE_SECONDS: Final = 0.05
LONGEST_PAUSE_SECONDS: Final = 2.0


@dataclass(slots=True, eq=False)
class Bell:
    """Rings when a job of one of these names may have become claimable."""

    names: frozenset[bytes]
    rung: asyncio.Event = field(default_factory=asyncio.Event)


class Notices:
    """The wake-ups and events of one queue, for the waiters and subscribers of one storage object."""

    def __init__(self, queue: QueueScripts) -> None:
        self._queue = queue
        self._broadcast = Broadcast()
        self._subscribers = 0
        self._cancels = Broadcast()
        self._bells: set[Bell] = set()
        self._reader: asyncio.Task[None] | None = None
        self._connection: AbstractConnection | None = None
        self._wanted: set[bytes] = set()  # channels to be heard; written by callers, read by the reader
        self._heard: dict[bytes, asyncio.Event] = {}  # set while the server has confirmed the channel
        self._failure: asyncio.Future[WorkersError] | None = None  # done when the connection breaks, or cannot be made
        self._hurry = asyncio.Event()  # somebody waits for the connection
        self._telling: asyncio.Task[None] | None = None
        self._messages = 0  # that came, ever; counted by the reader, read by its watch

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
        await self._hear(self._queue.channels[0])

    @asynccontextmanager
    async def subscribe(self, job_id: str | None) -> AsyncIterator[BufferedSubscription]:
        """Events of one job, of every job with None, that happen from now on."""
        self._subscribers += 1
        try:
            await self._hear(self._queue.channels[1])
            scope = self._broadcast.everything() if job_id is None else self._broadcast.of_job(job_id)
            with scope as subscription:
                yield subscription
        finally:
            self._subscribers -= 1

    @asynccontextmanager
    async def cancel_requests(self) -> AsyncIterator[BufferedSubscription]:
        """Requests to cancel a running job from now on."""
        await self._hear(self._queue.channels[2])
        with self._cancels.cancel_requests() as subscription:
            yield subscription

    async def close(self) -> None:
        """Nothing is heard any more."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _hear(self, channel: bytes) -> None:
        failure = self._start()
        heard = self._heard.setdefault(channel, asyncio.Event())
        if heard.is_set():
            return
        if channel not in self._wanted:
            self._wanted.add(channel)
            if self._connection is not None:
                await self._send(self._connection, "SUBSCRIBE", channel)
        self._hurry.set()
        confirmed = asyncio.ensure_future(heard.wait())
        try:
            tasks = (confirmed, failure)
            await asyncio.wait(tasks, timeout=self._queue.server.timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            confirmed.cancel()
        if not heard.is_set():
            cause = failure.result() if failure.done() else None
            raise StorageUnavailable("the Redis server did not confirm a subscription") from cause

    def _start(self) -> asyncio.Future[WorkersError]:
        """The reader runs, in this event loop; the failure it will meet next."""
        loop = asyncio.get_running_loop()
        if self._reader is None or self._reader.done() or self._reader.get_loop() is not loop:
            self._wanted, self._heard, self._connection = set(), {}, None
            self._failure, self._hurry = loop.create_future(), asyncio.Event()
            self._reader = loop.create_task(self._read(), name=f"redis-notices-{self._queue.base!r}")
        assert self._failure is not None
        return self._failure

    async def _send(self, connection: AbstractConnection, *command: str | bytes) -> None:
        with translated():
            await connection.send_packed_command(connection.pack_command(*command))

    async def _read(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                async with self._queue.server.connection() as connection:
                    try:
                        await self._send(connection, "SUBSCRIBE", *self._wanted)
                        self._connection = connection
                        pause = FIRST_PAUSE_SECONDS
                        await self._listen(connection)
                    finally:
                        # Still subscribed: it must not go back to the pool as one of the others.
                        self._connection = None
                        await connection.disconnect(nowait=True)
            except WorkersError as error:
                self._fail(error)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._hurry.wait()
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    def _fail(self, error: WorkersError) -> None:
        """Nothing is heard, and everybody knows."""
        self._hurry.clear()
        for heard in self._heard.values():
            heard.clear()
        assert self._failure is not None
        self._failure.set_result(error)
        self._failure = asyncio.get_running_loop().create_future()
        self._ring(())

    async def _listen(self, connection: AbstractConnection) -> None:
        """Take what comes, until the connection breaks or a ping is not answered."""
        watching = asyncio.create_task(self._watch(connection), name="redis-notices-watch")
        try:
            while True:
                with translated():
                    message = await connection.read_response()
                self._messages += 1
                await self._take(connection, message)
        finally:
            tasks = [task for task in (watching, self._telling) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, connection: AbstractConnection) -> None:
        """Closes a line that has gone dead, which the reader would wait at for ever."""
        while True:
            messages = self._messages
            await asyncio.sleep(PING_SECONDS)
            if self._messages != messages:
                continue
            with suppress(WorkersError):
                await self._send(connection, "PING")
            await asyncio.sleep(PING_SECONDS)
            if self._messages == messages:
                await connection.disconnect(nowait=True)
                return

    async def _take(self, connection: AbstractConnection, message: Reply) -> None:
        wake, told, cancels = self._queue.channels
        match message:
            case [b"subscribe", channel, _]:
                self._heard.setdefault(channel, asyncio.Event()).set()
                if channel == told and self._broadcast.awaited():
                    self._telling = asyncio.create_task(self._tell_ended(), name="redis-notices-tell-ended")
            case [b"message", channel, body] if channel == wake:
                self._ring(unpack(body))
            case [b"message", channel, job_id] if channel == cancels:
                self._cancels.request_cancel(job_id.decode())
            case [b"message", channel, body]:
                await self._tell(connection, channel, unpack(body))

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

    async def _tell(self, connection: AbstractConnection, channel: bytes, events: list[Reply]) -> None:
        if self._subscribers == 0 and channel in self._wanted:
            self._wanted.discard(channel)
            self._heard.pop(channel).clear()
            with suppress(WorkersError):
                await self._send(connection, "UNSUBSCRIBE", channel)
            return
        for kind, job_id in zip(events[::2], events[1::2], strict=True):
            if kind in KINDS:
                self._broadcast.publish(KINDS[kind], job_id.decode())
