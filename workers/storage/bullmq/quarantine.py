"""Jobs and keys that BullMQ's scripts would stop half-way at, out of the way of all others.

Theory of operation. Other producers choose ids, and whoever reaches the server writes what he likes. One job with the
id `completed` has its hash where the queue's set of completed jobs belongs; BullMQ's scripts stop there, having taken
jobs out of one line and not put them into another. So a script of ours looks before they run: at the keys of the
queue, and at the jobs that the next claims or the next recovery will meet. What it finds is renamed to
`<prefix>:<queue>:workers:quarantine:<id>` and written down in the hash `<prefix>:<queue>:workers:quarantine`, in one
step, so that exactly one process tells of it. A key in the way that is no job's is not touched: it is named until
somebody asks for `repair`.
"""

from __future__ import annotations

import json
from typing import Final

from workers.checks import MAX_ATTEMPTS, MAX_PRIORITY
from workers.errors import StorageDamaged, StorageError
from workers.jobs import EnqueueStatus, NewJob, Repaired, RepairOutcome, SetAside
from workers.storage.bullmq.access import QueueAccess
from workers.storage.bullmq.codec import OWN_KEYS, decode_id, decode_options
from workers.storage.bullmq.jobs import Jobs
from workers.storage.bullmq.server import Reply
from workers.storage.on_redis.node_values import decode_bytes, json_object, moment, whole
from workers.storage.on_redis.server import Command

READ_AT_ONCE: Final = 1_000


class Quarantine:
    """What was set aside of one queue."""

    def __init__(self, queue: QueueAccess, jobs: Jobs) -> None:
        self._queue = queue
        self._jobs = jobs
        self._key = f"{queue.lua.base}{OWN_KEYS}:quarantine"
        self._news: list[SetAside] = []

    def look(self, claims: int) -> Command:
        """The command that sets aside what would break the next `claims`, with 0 a recovery; `heed` takes its reply."""
        return self._queue.lua.guard(self._queue.now_ms(), claims)

    def heed(self, reply: Reply) -> StorageError | None:
        """Remember what was set aside; the error that names a key in the way."""
        if isinstance(reply, StorageError):
            return reply
        (told, damage), now = reply, moment(self._queue.now_ms())
        pairs = zip(told[::2], told[1::2], strict=True)
        self._news += [SetAside(id=decode_id(raw), reason=reason, at=now) for raw, reason in pairs]
        return StorageDamaged(f"the queue is damaged: {damage}") if damage else None

    async def mend(self) -> None:
        """What would break a recovery is set aside.

        Raises:
            StorageDamaged: a key is in the way that is no job's.
        """
        [reply] = await self._queue.server.run([self.look(0)])
        if error := self.heed(reply):
            raise error

    def news(self) -> list[SetAside]:
        """What was set aside here since this was last asked."""
        news, self._news = self._news, []
        return news

    async def entries(self) -> list[SetAside]:
        """Everything in quarantine, the oldest first."""
        return sorted((await self._entries()).values(), key=lambda entry: entry.at)

    async def _entries(self) -> dict[str, SetAside]:
        """By their ids in Redis."""
        found: dict[str, str] = {}
        cursor = "0"
        while True:
            [reply] = await self._queue.server.run([("HSCAN", self._key, cursor, "COUNT", READ_AT_ONCE)])
            if isinstance(reply, StorageError):
                raise reply
            cursor, flat = str(reply[0]), reply[1]
            found |= dict(zip(flat[::2], flat[1::2], strict=True))
            if cursor == "0":
                return {raw: _entry(raw, text) for raw, text in found.items()}

    async def repair(self, *, drop: bool) -> list[Repaired]:
        """See `Repairable.repair`."""
        moved = await self._move_what_is_in_the_way()
        return moved + [
            Repaired(id=entry.id, reason=entry.reason, outcome=await self._repair(raw, entry, drop=drop))
            for raw, entry in (await self._entries()).items()
            if entry.id not in {one.id for one in moved}
        ]

    async def _move_what_is_in_the_way(self) -> list[Repaired]:
        [reply] = await self._queue.server.run([self._queue.lua.guard(self._queue.now_ms(), -1)])
        if isinstance(reply, StorageError):
            raise reply
        told, _ = reply
        pairs = zip(told[::2], told[1::2], strict=True)
        return [Repaired(id=name, reason=reason, outcome=RepairOutcome.MOVED) for name, reason in pairs]

    async def _repair(self, raw: str, entry: SetAside, *, drop: bool) -> RepairOutcome:
        place = f"{self._key}:{raw}"
        job = _job(entry.id, await self._fields(place))
        if job is not None:
            [result] = await self._jobs.enqueue([job])
            if result.status is EnqueueStatus.QUEUED:
                await self._forget(raw, place)
                return RepairOutcome.REQUEUED
        if not drop:
            return RepairOutcome.KEPT
        await self._forget(raw, place)
        return RepairOutcome.DROPPED

    async def _fields(self, place: str) -> dict[str, str]:
        """The fields of the job that lies there; none where it is no hash."""
        names = ("name", "data", "opts", "priority")
        [values] = await self._queue.server.run([("HMGET", place, *names)])
        if isinstance(values, StorageError):
            return {}
        return {name: value for name, value in zip(names, values, strict=True) if value is not None}

    async def _forget(self, raw: str, place: str) -> None:
        await self._queue.server.run_atomic([[("DEL", place), ("HDEL", self._key, raw)]])


def _entry(raw: str, text: str) -> SetAside:
    try:
        reason, at_ms, _ = json.loads(text)
    except (ValueError, TypeError):  # somebody else's
        reason, at_ms = "", 0
    return SetAside(id=decode_id(raw), reason=str(reason), at=moment(whole(at_ms)))


def _job(job_id: str, fields: dict[str, str]) -> NewJob | None:
    """The job as a new one, with what its options say that we understand; None for what is none."""
    if "name" not in fields or "data" not in fields:
        return None
    options = decode_options(json_object(fields.get("opts")))
    try:
        return NewJob(
            id=job_id,
            name=fields["name"],
            payload=decode_bytes(fields["data"]),
            max_attempts=min(options.max_attempts, MAX_ATTEMPTS),
            keep_completed=options.keep_completed,
            keep_failed=options.keep_failed,
            priority=min(whole(fields.get("priority")), MAX_PRIORITY),
            backoff=options.backoff,
        )
    except ValueError:  # an id or a name that no job of ours may have
        return None
