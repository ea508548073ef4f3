"""The common base of the parts of a BullMQ storage: the server, the queue's scripts, the clock, job records."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from workers.errors import StorageError
from workers.storage.bullmq.codec import OWN_KEYS, raw_ids
from workers.storage.bullmq.record import FIELDS, BullMQRecord, reading, record
from workers.storage.bullmq.scripts import BullMQScripts
from workers.storage.bullmq.server import BullMQServer
from workers.storage.on_redis.node_values import to_ms
from workers.storage.on_redis.wire import Command, Reply
from workers.storage.rules import WORKER_RECORD

WORKER_RECORD_MS: Final = to_ms(WORKER_RECORD)
SEEN_EVERY_MS: Final = 1_000
KNOWN_WORKERS: Final = 1_000
READ_AT_ONCE: Final = 500
"""How many jobs are read in one transaction at most; the server serves nobody else meanwhile."""


class QueueAccess:
    """One queue on one server, and how often a job of another producer may stall there."""

    def __init__(self, server: BullMQServer, lua: BullMQScripts, *, max_foreign_stalls: int) -> None:
        self.server = server
        self.lua = lua
        self.max_foreign_stalls = max_foreign_stalls
        self.workers_key = f"{lua.base}{OWN_KEYS}:seen"
        self.cancels_key = f"{lua.base}{OWN_KEYS}:cancel-requests"
        self.last_claimer = ""  # who was last seen: a worker claims before it waits
        self._seen: dict[str, int] = {}

    def now_ms(self) -> int:
        """Return the time of this client's clock, by which BullMQ delays jobs."""
        return time.time_ns() // 1_000_000

    def server_ms(self) -> int:
        """Return the time of the server's clock, as far as is known, by which records are kept.

        By clients' clocks, one that is fast would remove the records of all others.
        """
        return self.now_ms() + round(self.server.seen.clock_offset * 1000)

    def seen(self, worker_id: str) -> list[Command]:
        """Return the commands that note that the worker is alive; none if that was noted a moment ago."""
        self.last_claimer = worker_id
        now_ms = self.server_ms()
        if abs(now_ms - self._seen.get(worker_id, 0)) < SEEN_EVERY_MS:
            return []
        if len(self._seen) >= KNOWN_WORKERS:
            self._seen.clear()
        self._seen[worker_id] = now_ms
        return [("ZADD", self.workers_key, now_ms, worker_id), ("PEXPIRE", self.workers_key, WORKER_RECORD_MS)]

    def unseen(self, worker_id: str) -> Command:
        """Return the command that forgets when the worker was seen."""
        self._seen.pop(worker_id, None)
        return ("ZREM", self.workers_key, worker_id)

    async def ask(self, commands: Sequence[Command]) -> list[Reply]:
        """Run the commands and return their answers.

        Raises:
            StorageError: one of them failed; the others may have run.
        """
        replies = await self.server.run(commands)
        for reply in replies:
            if isinstance(reply, StorageError):
                raise reply
        return replies

    async def records(self, raws: Sequence[str], now_ms: int, names: Sequence[str] = FIELDS) -> list[BullMQRecord]:
        """Return the jobs as they stand, each a consistent view."""
        found: list[BullMQRecord] = []
        for start in range(0, len(raws), READ_AT_ONCE):
            some = raws[start : start + READ_AT_ONCE]
            replies = await self.server.run_atomic([reading(self.lua, raw, names) for raw in some])
            found += [record(raw, answer, now_ms, names) for raw, answer in zip(some, replies, strict=True)]
        return found

    async def find(self, ids: Sequence[str], names: Sequence[str] = FIELDS) -> list[BullMQRecord]:
        """Return the jobs of these public ids; if an id may mean several jobs, the first that exists."""
        candidates = [raw_ids(job_id) for job_id in ids]
        records = iter(await self.records([raw for raws in candidates for raw in raws], self.server_ms(), names))
        return [meant([next(records) for _ in raws]) for raws in candidates]


def meant(candidates: Sequence[BullMQRecord]) -> BullMQRecord:
    """Return the record of a public id, from those of the ids in Redis that it may stand for."""
    return next((one for one in candidates if one.state is not None), candidates[0])
