"""The messages published about one Bull queue, by us and by Node.

Theory of operation. Waiters listen on the channels where Bull announces that a job was added or is delayed, and that
the queue goes on. The content of such a message does not matter: it makes them look. Not everything is announced (a
retry at once, a promotion by hand and a stalled job are not), so waiters also look by themselves. A busy worker does
not wait. A wake-up for nobody ends that subscription, because each added job is one message.

Our events are on a channel of ours, many in one message. Node of dialect C announces its events one at a time, on
channels without the prefix of the keys. There we announce ours to Node, too. All of our processes use one name there,
by which our own messages are recognised and skipped. Messages that are no events of Node are skipped as well.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from workers.jobs import JobEventKind
from workers.storage.bull.codec import decode_id
from workers.storage.bull.scripts import EMITTER, BullScripts
from workers.storage.on_redis.messages import KINDS, unpack
from workers.storage.on_redis.node_values import whole
from workers.storage.on_redis.subscribers import ChannelSubscribers
from workers.storage.subscribers import Told

NODE_KINDS: Final[Mapping[str, JobEventKind]] = {
    "waiting": JobEventKind.QUEUED,
    "stalled": JobEventKind.QUEUED,
    "progress": JobEventKind.PROGRESS,
    "completed": JobEventKind.COMPLETED,
    "failed": JobEventKind.FAILED,
}

LINGER_SECONDS: Final = 1.0
"""How long wake-ups are still heard when nobody waits any more."""
MOST_BYTES: Final = 16 << 20
"""The longest message of Node that is read."""


class BullSubscribers(ChannelSubscribers):
    """The wake-ups and events of one queue; `ends` says how jobs ended, for those who may have missed it."""

    def __init__(
        self, queue: BullScripts, ends: Callable[[Sequence[str]], Awaitable[Sequence[JobEventKind | None]]]
    ) -> None:
        super().__init__(queue.server, repr(queue.base))
        self._queue = queue
        self._ends = ends
        self._waited_at = 0.0  # when the last waiter left, on the monotonic clock

    @property
    def wake_channels(self) -> tuple[bytes, ...]:
        return tuple(self._queue.base + name for name in (b"jobs", b"delayed", b"paused"))

    @property
    def event_channels(self) -> tuple[bytes, ...]:
        names = NODE_KINDS if self._queue.dialect == "C" else ()
        return self._queue.own_channel("events"), *(f"{name}@{self._queue.queue}".encode() for name in names)

    @property
    def cancel_channel(self) -> bytes:
        return self._queue.own_channel("cancels")

    @contextmanager
    def woken(self, names: Collection[str]) -> Iterator[asyncio.Event]:
        with super().woken(names) as woken:
            try:
                yield woken
            finally:
                self._waited_at = time.monotonic()

    def heard(self, channel: bytes, body: bytes) -> bool:
        if channel in self.wake_channels and not self._waiting:
            return time.monotonic() - self._waited_at < LINGER_SECONDS
        return super().heard(channel, body)

    def read_names(self, body: bytes) -> Collection[bytes]:
        return ()

    def read_events(self, channel: bytes, body: bytes) -> Iterable[Told]:
        if channel != self.event_channels[0]:
            yield from _events_of_node(channel, body)
            return
        try:
            events = unpack(body)
            found = [(KINDS[kind], decode_id(raw), None) for kind, raw in zip(events[::2], events[1::2], strict=True)]
        except Exception:  # whatever msgpack makes of foreign bytes: the message is not ours
            return
        yield from found

    def read_id(self, body: bytes) -> str:
        return decode_id(body)

    async def ends(self, ids: Sequence[str]) -> Sequence[JobEventKind | None]:
        return await self._ends(ids)


def _events_of_node(channel: bytes, body: bytes) -> Iterator[Told]:
    """Yield the event in a message of Node: `[who, job, ...]`, with the id among the job's options."""
    try:
        message = json.loads(body) if len(body) <= MOST_BYTES else None
    except (ValueError, RecursionError):
        return
    match message:
        case [emitter, {"opts": {"jobId": str() | int() as raw}} as job, *_] if emitter != EMITTER:
            kind = NODE_KINDS[channel.decode().partition("@")[0]]
            if kind is JobEventKind.FAILED and whole(job.get("attemptsMade")) < whole(job.get("attempts")):
                kind = JobEventKind.FAILING
            yield kind, decode_id(str(raw).encode(errors="surrogatepass")), None
