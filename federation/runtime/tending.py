"""What a delivering process does for absent servers, again and again: probe those due, release what is held.

This runs beside the workers and not among the recurring jobs, which one process at a time runs under a lease: every
process may do it at once, as each probe and each batch is taken by one of them in the database.
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
    """Runs each of `ticks` at its interval, independently of each other, from `start` until `stop`.

    The interval is counted from the end of a tick; it doubles after each that raises, up to `LONGEST_PAUSE`. Each waits
    for what `ready` returns; if that raises, the tick is left out as if it had.
    """

    def __init__(self, ticks: Mapping[Tick, timedelta], *, ready: Tick | None = None) -> None:
        self._ticks = dict(ticks)
        self._ready = ready
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the ticks, unless they are running."""
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._repeat(tick, interval), name=_name(tick))
                for tick, interval in self._ticks.items()
            ]

    async def stop(self) -> None:
        """Stop all ticks."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _repeat(self, tick: Tick, interval: timedelta) -> None:
        pause = interval
        while True:
            await asyncio.sleep(pause.total_seconds())
            try:
                if self._ready is not None:
                    await self._ready()
                await tick()
                pause = interval
            except Exception as error:  # the database or the queue is away; everything due stays due
                pause = min(pause * 2, LONGEST_PAUSE)
                log.error("tending_failed", **crash(error))
