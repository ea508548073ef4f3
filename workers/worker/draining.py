"""A worker that runs for as long as something is left for it, in tests of applications."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from workers.worker.worker import Worker


async def run_while(worker: Worker, is_left: Callable[[], Awaitable[object]], changed: asyncio.Event) -> None:
    """Run the worker until nothing is left, which is asked again whenever an observer of it sets `changed`.

    It stops before this returns, and what ends it early is raised.
    """
    running = asyncio.create_task(worker.run())
    try:
        while await is_left() and not running.done():
            waiting = asyncio.create_task(changed.wait())
            await asyncio.wait([waiting, running], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            changed.clear()
    finally:
        worker.stop()
        await running
