"""Handlers that are told why they are to end."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from tests.workers.running import forever
from workers.errors import LossReason
from workers.worker.handlers import Job, SignalReason

HOUR = timedelta(hours=1)


class Listener:
    """A handler that runs until it is told to end, and keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[SignalReason | None, LossReason | None]] = []
        self.cancelled = asyncio.Event()

    async def __call__(self, job: Job) -> None:
        try:
            await forever(job)
        finally:
            self.told.append((job.signal.reason, job.signal.loss))
            self.cancelled.set()
