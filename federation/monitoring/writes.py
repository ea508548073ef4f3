"""Whether the database takes writes, tried in the background: a full disk and a standby answer queries as ever."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta
from typing import Final

from db import Database
from federation.base.settings.reach import write_problem
from federation.monitoring.readiness import NotReady

INTERVAL: Final = timedelta(seconds=10)
JITTER: Final = 0.1
PATIENCE: Final = timedelta(seconds=5)
"""How long a write may take. Longer than transactions of this or another process keep SQLite's lock."""


class WriteTrials:
    """Callable as a check: raises unless the last write was done. The first one is waited for.

    From the first call until `close`, a write is tried every ten seconds, however many ask meanwhile. One that takes
    longer than `patience` is given up and has failed.
    """

    def __init__(self, database: Database, *, interval: timedelta = INTERVAL, patience: timedelta = PATIENCE) -> None:
        self._database = database
        self._interval = interval.total_seconds()
        self._patience = patience.total_seconds()
        self._trying: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()
        self._problem: str | None = None  # written by the trials alone

    async def __call__(self) -> None:
        if self._trying is None:
            self._trying = asyncio.create_task(self._keep_trying(), name="write-trials")
        await self._tried.wait()
        if self._problem is not None:
            raise NotReady(f"the database takes no writes: {self._problem}")

    async def close(self) -> None:
        """Try no more, and wait until nothing is under way."""
        if self._trying is not None:
            self._trying.cancel()
            await asyncio.wait([self._trying])

    async def _keep_trying(self) -> None:
        while True:
            self._problem = await self._try()
            self._tried.set()
            await asyncio.sleep(self._interval * random.uniform(1 - JITTER, 1 + JITTER))  # noqa: S311 - spreads load, guards nothing

    async def _try(self) -> str | None:
        """Return why the write failed, or None if it was done."""
        try:
            async with asyncio.timeout(self._patience):
                return await write_problem(self._database)
        except TimeoutError:
            return f"one was not done within {self._patience:g} s"
        except Exception as error:  # otherwise the last result would stand for ever
            return type(error).__name__
