"""What a delivering process does for servers that are away, each second: look at those due, and release what is held.

Beside the workers and not among the recurring jobs, which one process at a time runs and a lease guards: every process
may do this at once, as each look and each batch is taken by one of them in the database.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Final

import structlog

from federation.base.logs import crash

log = structlog.get_logger(__name__)

INTERVAL: Final = timedelta(seconds=1)
LONGEST_PAUSE: Final = timedelta(seconds=30)

Tick = Callable[[], Awaitable[object]]


def _name(tick: Tick) -> str:
    return f"tending-{getattr(tick, '__qualname__', 'tick')}"


class Tending:
    """Runs each of `ticks` every second, apart from each other, from `start` until `stop`."""

    def __init__(self, ticks: Sequence[Tick], *, interval: timedelta = INTERVAL) -> None:
        self._ticks = ticks
        self._interval = interval
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """They run; nothing happens if they do."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._repeat(tick), name=_name(tick)) for tick in self._ticks]

    async def stop(self) -> None:
        """None of them runs any more."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _repeat(self, tick: Tick) -> None:
        pause = self._interval
        while True:
            await asyncio.sleep(pause.total_seconds())
            try:
                await tick()
                pause = self._interval
            except Exception as error:  # the database or the queue is away; everything due stays so
                pause = min(pause * 2, LONGEST_PAUSE)
                log.error("tending_failed", **crash(error))
