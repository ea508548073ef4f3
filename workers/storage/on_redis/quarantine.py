"""The quarantine on a Redis server, for every layout: it keeps what no worker can run out of the way.

Theory of operation. Everybody who reaches the server can write what he likes. A script of the layout takes such a thing
off the lines and notes it in the hash `...quarantine`, in one step, so that exactly one process reports it. If it has a
key of its own, that is renamed to `...quarantine:<id>`. A key that takes the place of one of the queue's is not
touched, because it may be anybody's; it is named until somebody asks for `repair`. `lua/quarantine.lua` is the other
half.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Final

from workers.errors import StorageError
from workers.jobs import EnqueueResult, EnqueueStatus, NewJob, Repaired, RepairOutcome, SetAside
from workers.storage.on_redis.node_values import moment, whole
from workers.storage.on_redis.server import RedisServer
from workers.storage.on_redis.wire import Reply

READ_AT_ONCE: Final = 1_000


class Quarantine(ABC):
    """What was set aside of one queue, under the key `key`."""

    def __init__(self, server: RedisServer, key: str) -> None:
        self._server = server
        self._key = key
        self._news: list[SetAside] = []

    @abstractmethod
    def _name(self, raw: str) -> str:
        """Return the id that a job in Redis goes by."""

    @abstractmethod
    async def _move_what_is_in_the_way(self) -> Sequence[Reply]:
        """Move keys in the place of the queue's own to quarantine, and return `[name, why, ...]`."""

    @abstractmethod
    async def _job(self, job_id: str, place: str) -> NewJob | None:
        """Return what is at the key `place` as a new job; None if it is no job."""

    @abstractmethod
    async def _enqueue(self, job: NewJob) -> EnqueueResult: ...

    def heed(self, told: Sequence[Reply]) -> None:
        """Remember what a script has just set aside: `[raw id, why, ...]`."""
        at = datetime.now(UTC)
        self._news += [SetAside(id=self._name(raw), reason=why, at=at) for raw, why in _pairs(told)]

    def news(self) -> list[SetAside]:
        """Return what was set aside here since the last call."""
        news, self._news = self._news, []
        return news

    async def entries(self) -> list[SetAside]:
        """Return everything in quarantine, oldest first."""
        return sorted((await self._entries()).values(), key=lambda entry: entry.at)

    async def repair(self, *, drop: bool) -> list[Repaired]:
        """See `Repairable.repair`."""
        moved = [
            Repaired(id=name, reason=why, outcome=RepairOutcome.MOVED)
            for name, why in _pairs(await self._move_what_is_in_the_way())
        ]
        names = {one.id for one in moved}
        entries = (await self._entries()).items()
        return moved + [await self._repair(raw, entry, drop=drop) for raw, entry in entries if entry.id not in names]

    async def _entries(self) -> dict[str, SetAside]:
        """Return everything in quarantine, by its id in Redis."""
        found: dict[str, str] = {}
        cursor = "0"
        while True:
            [reply] = await self._server.run([("HSCAN", self._key, cursor, "COUNT", READ_AT_ONCE)])
            if isinstance(reply, StorageError):
                raise reply
            cursor = text(reply[0])
            found |= dict(_pairs(reply[1]))
            if cursor == "0":
                return {raw: self._entry(raw, written) for raw, written in found.items()}

    def _entry(self, raw: str, written: str) -> SetAside:
        try:
            reason, at_ms, _ = json.loads(written)
        except (ValueError, TypeError, RecursionError):  # not written by us
            reason, at_ms = "", 0
        return SetAside(id=self._name(raw), reason=str(reason), at=moment(whole(at_ms)))

    async def _repair(self, raw: str, entry: SetAside, *, drop: bool) -> Repaired:
        place = f"{self._key}:{raw}"
        outcome, reason = RepairOutcome.KEPT, entry.reason
        job = await self._job(entry.id, place)
        if job is not None and (await self._enqueue(job)).status is EnqueueStatus.QUEUED:
            outcome = RepairOutcome.REQUEUED
            if job.id != entry.id:
                reason = f"{reason}; its id is {job.id!r} now"
        elif drop:
            outcome = RepairOutcome.DROPPED
        if outcome is not RepairOutcome.KEPT:
            await self._server.run([("MULTI",), ("DEL", place), ("HDEL", self._key, raw), ("EXEC",)])
        return Repaired(id=entry.id, reason=reason, outcome=outcome)

    async def _fields(self, place: str, *names: str) -> dict[str, bytes]:
        """Return these fields of the hash at `place`; none if it is no hash."""
        [values] = await self._server.run([("HMGET", place, *names)])
        if isinstance(values, StorageError):
            return {}
        found = zip(names, values, strict=True)
        return {
            name: value if isinstance(value, bytes) else value.encode(errors="surrogateescape")
            for name, value in found
            if value is not None
        }


def text(value: Reply) -> str:
    """Return the reply as text, whatever it is made of, and whichever bytes another program wrote."""
    return value.decode(errors="surrogateescape") if isinstance(value, bytes) else str(value)


def _pairs(flat: Sequence[Reply]) -> Iterator[tuple[str, str]]:
    texts = [text(one) for one in flat]
    return zip(texts[::2], texts[1::2], strict=True)
