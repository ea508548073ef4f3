"""What the queue says of the Node library that it belongs to: which it is, and whether it collects metrics."""

from __future__ import annotations

import logging
import re
from typing import Final

from workers.errors import ForeignQueue, StorageError
from workers.storage.bullmq.access import QueueAccess
from workers.storage.on_redis.ownership import Ownership
from workers.storage.on_redis.wire import Command, Reply

logger = logging.getLogger(__name__)

MAJORS: Final = ("5", "6")
"""The versions of Node's BullMQ that share a queue with us in our tests."""
METRICS_KEPT: Final = 20_160
"""How many minutes a queue keeps where only its keys say that it collects metrics: BullMQ's longest, two weeks."""

_COUNTER: Final = re.compile(r"\d{1,15}\Z", re.ASCII)
_VERSION: Final = re.compile(r"(bullmq[a-z-]*):(\d{1,9})\.", re.ASCII)


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
