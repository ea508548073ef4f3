"""What the queue says of the Node library that it belongs to: its version, and whether it collects metrics."""

from __future__ import annotations

import re
from typing import Final

from workers.errors import Unsupported
from workers.storage.bullmq.access import QueueAccess

MAJORS: Final = ("5", "6")
"""The versions of Node's BullMQ that share a queue with us in our tests."""
METRICS_KEPT: Final = 20_160
"""How many minutes a queue keeps where only its keys say that it collects metrics: BullMQ's longest, two weeks."""

_VERSION: Final = re.compile(r"(bullmq[a-z-]*):(\d{1,9})\.", re.ASCII)


class Library:
    """The part of a queue's keys that describes the queue itself; `metrics`: how many minutes to count, if any."""

    def __init__(self, queue: QueueAccess, name: str, metrics: int | None) -> None:
        self._queue = queue
        self._name = name
        queue.lua.metrics = metrics

    async def check(self) -> None:
        """Refuse a queue of a version that keeps jobs in a way unknown here; one that says nothing is none.

        Raises:
            Unsupported: Node uses the queue with such a version.
        """
        [version] = await self._queue.server.run([("HGET", self._queue.lua["meta"], "version")])
        found = _VERSION.match(version) if isinstance(version, str) else None
        if found is not None and (found[1] != "bullmq" or found[2] not in MAJORS):
            raise Unsupported(
                f"the queue {self._name!r} belongs to {version[:60]}; known here are bullmq {' and '.join(MAJORS)}"
            )
        await self.look_for_metrics()

    async def look_for_metrics(self) -> None:
        """Count what ends in the queue from now on, if a worker of Node does, unless that was chosen."""
        if self._queue.lua.metrics is None:
            keys = [f"{self._queue.lua.base}metrics:{target}" for target in ("completed", "failed")]
            [counted] = await self._queue.server.run([("EXISTS", *keys)])
            if isinstance(counted, int) and counted:
                self._queue.lua.metrics = METRICS_KEPT
