"""What a delivering process does for servers that are away, again and again: look at those due, release what is held.

Beside the workers and not among the recurring jobs, which one process at a time runs and a lease guards: every process
may do this at once, as each look and each batch is taken by one of them in the database.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import Final

import structlog

from federation.base.logs import crash

log = structlog.get_logger(__name__)

LONGEST_PAUSE: Final = timedelta(seconds=30)

Tick = Callable[[], Awaitable[object]]


def _name(tick: Tick) -> str:
    return f"tending-{getattr(tick, '__qualname__', 'tick')}"


class Tending:
    """Runs each of `ticks` at its interval, apart from each other, from `start` until `stop`.

    The interval is counted from the end of a tick; it doubles after each that raises, up to `LONGEST_PAUSE`.
    """

    def __init__(self, ticks: Mapping[Tick, timedelta]) -> None:
        self._ticks = dict(ticks)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """They run; nothing happens if they do."""
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(_repeat(tick, interval), name=_name(tick)) for tick, interval in self._ticks.items()
            ]

    async def stop(self) -> None:
        """None of them runs any more."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _repeat(tick: Tick, interval: timedelta) -> None:
    pause = interval
    while True:
        await asyncio.sleep(pause.total_seconds())
        try:
            await tick()
            pause = interval
        except Exception as error:  # the database or the queue is away; everything due stays so
            pause = min(pause * 2, LONGEST_PAUSE)
            log.error("tending_failed", **crash(error))
