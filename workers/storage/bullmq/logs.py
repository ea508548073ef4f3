"""The lines that handlers log, where Node's `getJobLogs` and dashboards look for them."""

from __future__ import annotations

from collections.abc import Sequence

from workers.jobs import LogLine
from workers.storage.bullmq.access import READ_AT_ONCE, QueueAccess
from workers.storage.bullmq.record import BullMQClaim


class JobLogs:
    """The logs of one queue's jobs."""

    def __init__(self, queue: QueueAccess) -> None:
        self._queue = queue

    async def add(self, lines: Sequence[LogLine]) -> None:
        """See `KeepsLogs.log`. BullMQ's script adds one line at a time; a pipeline takes 500 of them."""
        commands = [
            self._queue.lua.log(line.claim.raw, line.text, line.claim.options.logs_kept)
            for line in lines
            if isinstance(line.claim, BullMQClaim)
        ]
        for start in range(0, len(commands), READ_AT_ONCE):
            await self._queue.server.run(commands[start : start + READ_AT_ONCE])
