"""The quarantine of a Redis queue: jobs with damaged records, and keys that take the place of the queue's own.

A job whose record cannot be read fails, so that those who wait for it learn of it; its remains are kept in quarantine.
It can be queued again if only its run was damaged, and not what it was enqueued with.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable, Sequence

from workers.jobs import EnqueueResult, NewJob
from workers.storage.on_redis import quarantine
from workers.storage.on_redis.messages import unpack
from workers.storage.on_redis.quarantine import text
from workers.storage.on_redis.wire import Reply
from workers.storage.redis.codec import decode_new_job
from workers.storage.redis.scripts import RedisScripts

Enqueue = Callable[[Sequence[NewJob]], Awaitable[Sequence[EnqueueResult]]]


class RedisQuarantine(quarantine.Quarantine):
    """What was set aside of one queue."""

    def __init__(self, lua: RedisScripts, enqueue: Enqueue) -> None:
        super().__init__(lua.server, text(lua.base) + ":quarantine")
        self._lua = lua
        self._enqueue_all = enqueue

    def _name(self, raw: str) -> str:
        return raw

    async def _move_what_is_in_the_way(self) -> Sequence[Reply]:
        told: Sequence[Reply] = unpack(await self._lua.run("repair"))
        return told

    async def _enqueue(self, job: NewJob) -> EnqueueResult:
        [result] = await self._enqueue_all([job])
        return result

    async def _job(self, job_id: str, place: str) -> NewJob | None:
        record = (await self._fields(place, "job")).get("job")
        try:
            return decode_new_job(job_id, record) if record else None
        except (ValueError, OverflowError, struct.error):  # not all of it is ours
            return None
