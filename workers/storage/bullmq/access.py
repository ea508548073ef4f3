"""The common base of the parts of a BullMQ storage: the server, the queue's scripts, the clock, job records.

A queue says of the Node library that it belongs to which it is, and whether it collects metrics.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from typing import Final

from workers.errors import ForeignQueue, StorageError
from workers.storage.bullmq.codec import OWN_KEYS, raw_ids
from workers.storage.bullmq.record import FIELDS, BullMQRecord, reading, record
from workers.storage.bullmq.scripts import BullMQScripts
from workers.storage.bullmq.server import BullMQServer
from workers.storage.on_redis.node_values import to_ms
from workers.storage.on_redis.ownership import Ownership
from workers.storage.on_redis.wire import Command, Reply
from workers.storage.rules import WORKER_RECORD

logger = logging.getLogger(__name__)

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


MAJORS: Final = ("5", "6")
"""The versions of Node's BullMQ that share a queue with us in our tests."""
METRICS_KEPT: Final = 20_160
"""How many minutes a queue keeps where only its keys say that it collects metrics: BullMQ's longest, two weeks."""

_COUNTER: Final = re.compile(r"\d{1,15}\Z", re.ASCII)
_VERSION: Final = re.compile(r"(bullmq[a-z-]*):(\d{1,9})\.", re.ASCII)


class QueuePart:
    """A part of a BullMQ storage: it asks the queue."""

    def __init__(self, queue: QueueAccess) -> None:
        self._queue = queue
        self._lua = queue.lua


class Library:
    """The part of a queue's keys that describes the queue itself; `metrics`: how many minutes are to be counted."""

    def __init__(self, queue: QueueAccess, name: str, metrics: int | None) -> None:
        self._queue = queue
        self._name = name
        self._chosen = metrics
        self._told = False
        self.ownership = Ownership(self._ask_for_owner)

    async def check(self) -> None:
        """Refuse a queue of a version that keeps jobs in a way unknown here; one that says nothing is none.

        Raises:
            ForeignQueue: Node uses the queue with such a version, or with Bull.
        """
        await self.ownership.check()
        [version] = await self._queue.server.run([("HGET", self._queue.lua["meta"], "version")])
        found = _VERSION.match(version) if isinstance(version, str) else None
        if found is not None and (found[1] != "bullmq" or found[2] not in MAJORS):
            raise ForeignQueue(
                f"the queue {self._name!r} belongs to {version[:60]!r}; known here are bullmq {' and '.join(MAJORS)}"
            )
        await self.look_for_metrics()

    async def _ask_for_owner(self) -> Reply:
        [suspicion] = await self._queue.ask([self._queue.lua.owner()])
        return suspicion

    async def look_for_metrics(self) -> None:
        """Count what ends in the queue from now on, if that was chosen or a worker of Node does it.

        Not where the keys hold something else: BullMQ's script would stop there, with a job that it had half ended.
        """
        keys = [f"{self._queue.lua.base}metrics:{target}" for target in ("completed", "failed")]
        asked = [command for key in keys for command in _reading(key)]
        replies = await self._queue.server.run(asked)
        fit = all(map(_is_fit, replies[::2], replies[1::2]))
        exist = any(isinstance(found, list) and found[0] is not None for found in replies[::2])
        wanted = METRICS_KEPT if self._chosen is None and exist else self._chosen
        if wanted is not None and not fit and not self._told:
            self._told = True
            logger.warning(
                "the queue %s does not count what ends: its keys metrics:... are none of BullMQ's", self._name
            )
        self._queue.lua.metrics = wanted if fit else None


def _reading(key: str) -> tuple[Command, Command]:
    return ("HMGET", key, "count", "prevTS", "prevCount"), ("TYPE", f"{key}:data")


def _is_fit(counts: Reply, kind: Reply) -> bool:
    if isinstance(counts, StorageError) or kind not in ("none", "list"):
        return False
    return all(one is None or _COUNTER.match(one) for one in counts)
