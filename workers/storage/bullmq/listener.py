"""Job events from the stream that BullMQ keeps beside each queue, and from ours.

Theory of operation. One task per storage object reads the stream, from the first subscriber until there has been none
for a second, and hands events to all of them. A subscription asks for the last entry of the stream and returns when the
reader has passed it, so nothing older arrives and nothing newer is missed. A broken connection is made again, and
reading goes on where it stopped.

BullMQ has no word for a cancelled job, nor for one that goes on as the next link of its chain. So three events of ours
are written into the stream; Node's `QueueEvents` passes unknown names to those who listen for them. Requests to cancel
a running job are also in a stream of ours: a worker that read every event to find them would spend more on that than on
its jobs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final, TypeAlias

from workers.errors import StorageError, StorageUnavailable
from workers.homes import keep_inherited
from workers.jobs import JobEventKind
from workers.retention import TOLD_BYTES
from workers.retry import Backoff
from workers.storage.bullmq.access import QueueAccess
from workers.storage.bullmq.codec import decode_id
from workers.storage.bullmq.server import Reply
from workers.storage.on_redis.node_values import decode_bytes
from workers.storage.subscribers import BufferedSubscription, CancelRequests, Subscribers

CANCELLED_EVENT: Final = "cancelled"
CANCEL_REQUESTED_EVENT: Final = "cancel-requested"
CONTINUED_EVENT: Final = "continued"

KINDS: Final[Mapping[str, JobEventKind]] = {
    "added": JobEventKind.QUEUED,
    "active": JobEventKind.ACTIVE,
    "completed": JobEventKind.COMPLETED,
    "failed": JobEventKind.FAILED,
    "delayed": JobEventKind.FAILING,
    "progress": JobEventKind.PROGRESS,
    CONTINUED_EVENT: JobEventKind.QUEUED,
    CANCELLED_EVENT: JobEventKind.CANCELLED,
    CANCEL_REQUESTED_EVENT: JobEventKind.CANCEL_REQUESTED,
}
REQUEUED_FROM: Final = frozenset({"active", "failed", "completed"})
"""A `waiting` event with such a `prev` is a job put back; others follow `added`, or announce the end of a delay."""

PAGE: Final = 1_000
BLOCK_SECONDS: Final = 5.0
FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 2.0
CATCH_UP_SECONDS: Final = 10.0
LINGER_SECONDS: Final = 1.0
"""How long the reader outlives the last subscriber, because waiters often follow each other."""

Position: TypeAlias = tuple[int, int]


class StreamListener:
    """Subscriptions to the events in one stream of a queue."""

    def __init__(self, queue: QueueAccess, stream: str) -> None:
        self._queue = queue
        self._stream = stream
        self._listening = Subscribers()
        self._subscribers = 0
        self._left_at = 0.0  # when the last subscriber left, on the monotonic clock
        self._position: Position = (0, 0)  # written by the reader, read by new subscribers
        self._moved = asyncio.Condition()  # belongs to the reader and its event loop
        self._reader: asyncio.Task[None] | None = None
        self._stopped = ""  # the job of a `cancelled` event, whose next `failed` event tells no more
        self._added = ""  # the job of an `added` or `continued` event: its next `delayed` event is no failure

    @asynccontextmanager
    async def subscribe(self, job_id: str | None) -> AsyncIterator[BufferedSubscription]:
        """Subscribe to the events of one job, or of every job with None, from now on."""
        async with self._heard():
            with self._listening.scope(job_id) as subscription:
                yield subscription

    @asynccontextmanager
    async def cancel_requests(self) -> AsyncIterator[CancelRequests]:
        """Subscribe to requests to cancel a running job, from now on."""
        async with self._heard():
            with self._listening.cancel_requests() as subscription:
                yield subscription

    @asynccontextmanager
    async def _heard(self) -> AsyncIterator[None]:
        self._subscribers += 1
        try:
            await self._catch_up(await self._last_position())
            yield
        finally:
            self._subscribers -= 1
            self._left_at = time.monotonic()

    async def close(self) -> None:
        """Stop reading."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def forget(self) -> None:
        """Forget the event loop, which is gone with its reader and subscribers."""
        keep_inherited(self._reader)
        self._reader, self._subscribers, self._listening = None, 0, Subscribers()

    async def _last_position(self) -> Position:
        [entries] = await self._queue.server.run([("XREVRANGE", self._stream, "+", "-", "COUNT", 1)])
        if isinstance(entries, StorageError):
            raise entries
        return _position(entries[0][0]) if entries else (0, 0)

    async def _catch_up(self, last: Position) -> None:
        if self._reader is None or self._reader.done():
            self._position, self._moved = last, asyncio.Condition()
            self._reader = asyncio.create_task(self._read(), name=f"bullmq-events-{self._stream}")
            return
        try:
            async with asyncio.timeout(CATCH_UP_SECONDS), self._moved:
                await self._moved.wait_for(lambda: self._position >= last)
        except TimeoutError as error:
            raise StorageUnavailable(f"the events of the queue could not be read up to now: {last}") from error

    async def _read(self) -> None:
        backoff = Backoff(first=FIRST_PAUSE_SECONDS, longest=LONGEST_PAUSE_SECONDS)
        while self._subscribers or time.monotonic() - self._left_at < LINGER_SECONDS:
            try:
                await self._read_page()
                backoff.reset()
            except (StorageUnavailable, StorageError):
                await asyncio.sleep(backoff.pause())

    async def _read_page(self) -> None:
        since = "{}-{}".format(*self._position)
        wanted = ("COUNT", PAGE, "BLOCK", int(BLOCK_SECONDS * 1000), "STREAMS", self._stream, since)
        streams = await self._queue.server.run_blocking(("XREAD", *wanted), BLOCK_SECONDS)
        for _, entries in streams or []:
            for entry_id, flat in entries:
                self._publish(dict(zip(flat[::2], flat[1::2], strict=True)))
                self._position = _position(entry_id)
            if len(entries) == PAGE:  # older entries may have been trimmed unread: streams may be that short
                self._listening.miss_cancels("more requests to cancel were made at once than the stream keeps")
        async with self._moved:
            self._moved.notify_all()

    def _publish(self, event: Mapping[str, str]) -> None:
        name, raw = event.get("event", ""), event.get("jobId", "")
        kind = KINDS.get(name)
        if name == "waiting" and event.get("prev") in REQUEUED_FROM:
            kind = JobEventKind.FAILING if "failed" in event else JobEventKind.QUEUED
        if name == "delayed" and raw == self._added:
            kind = None
        if raw == self._stopped:
            self._stopped = ""
            kind = None if name == "failed" else kind
        if name == CANCELLED_EVENT:
            self._stopped = raw
        self._added = raw if name in ("added", CONTINUED_EVENT) else ""
        if kind is not None and raw:
            self._listening.publish(kind, decode_id(raw), _result_in(event) if name == "completed" else None)


def _result_in(event: Mapping[str, str]) -> bytes | None:
    """Return the result that BullMQ puts into the event, if it is small."""
    result = decode_bytes(event.get("returnvalue", "null"))
    return result if len(result) <= TOLD_BYTES else None


def _position(entry_id: Reply) -> Position:
    milliseconds, _, sequence = str(entry_id).partition("-")
    return int(milliseconds), int(sequence or 0)
