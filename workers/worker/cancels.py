"""Hears of cancel requests as they are made, long before the next renewal would tell."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from workers.errors import WorkersError
from workers.storage.base import Storage

FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 5.0


class CancelListener:
    """Calls `look` with the id of each job somebody asked to cancel, whoever runs it.

    A request is a hint: by the time it is heard, the attempt it was meant for may have ended and another have begun, so
    `look` asks the storage. One that is missed, renewals tell of.
    """

    def __init__(
        self, storage: Storage, *, look: Callable[[str], Awaitable[None]], report: Callable[[BaseException], None]
    ) -> None:
        self._storage = storage
        self._look = look
        self._report = report

    async def run(self) -> None:
        """Listen until cancelled; what keeps the storage from telling is reported, and tried again with back-off."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                async with self._storage.cancel_requests() as requests:
                    pause = FIRST_PAUSE_SECONDS
                    while True:
                        await self._look((await requests.get()).job_id)
            except WorkersError as error:  # never the worker's end: it can do without
                self._report(error)
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
