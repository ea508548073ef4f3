"""The messages published about one queue of the Redis storage."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from workers.jobs import JobEventKind
from workers.storage.on_redis.messages import KINDS, end_kind, unpack
from workers.storage.on_redis.subscribers import ChannelSubscribers
from workers.storage.redis import inspect
from workers.storage.redis.codec import bytes_of, text_of
from workers.storage.redis.scripts import RedisScripts
from workers.storage.subscribers import Told

RESULT: Final = 9
"""Stands in the place of an event in front of the end that it is the result of; `lua/queue.lua` has the same."""


class RedisSubscribers(ChannelSubscribers):
    """The wake-ups and events of one queue."""

    def __init__(self, queue: RedisScripts) -> None:
        super().__init__(queue.server, repr(queue.base))
        self._queue = queue

    @property
    def wake_channels(self) -> tuple[bytes, ...]:
        return self._queue.channels[:1]

    @property
    def event_channels(self) -> tuple[bytes, ...]:
        return self._queue.channels[1:2]

    @property
    def cancel_channel(self) -> bytes:
        return self._queue.channels[2]

    def read_names(self, body: bytes) -> Collection[bytes]:
        names: Collection[bytes] = unpack(body)
        return names

    def read_events(self, channel: bytes, body: bytes) -> Iterable[Told]:
        events, result = unpack(body), None
        for kind, about in zip(events[::2], events[1::2], strict=True):
            if kind in KINDS:
                yield KINDS[kind], text_of(about), result
            result = about if kind == RESULT else None

    def read_id(self, body: bytes) -> str:
        return text_of(body)

    async def ends(self, ids: Sequence[str]) -> Sequence[JobEventKind | None]:
        found = await inspect.ends(self._queue, [bytes_of(job_id) for job_id in ids])
        return [end_kind(end[0]) if end else None for end in found]
