"""Whether a worker may rely on its server, and whether jobs wait, or will, for a handler that nobody has.

Theory of operation. Nobody knows the handlers of all workers. But a job that one look finds queued, and the next one
again, while no job of its name runs and this worker is idle, is most probably one that no worker serves: a warning
says so, once per name. Workers of storages without a name filter fail such jobs, so they need no warning.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Final

from workers.errors import ServerUnfit, StorageError, StorageUnavailable
from workers.jobs import JobState
from workers.storage.abilities import Examined, Severity
from workers.storage.base import ANY_NAME, Storage
from workers.worker.events import log_line

logger = logging.getLogger(__name__)


async def connect_if_fit(storage: Storage) -> None:
    """Connect the storage, and leave it again if its server is set up so that it may lose acknowledged jobs.

    Raises:
        ServerUnfit: it is.
    """
    await storage.connect()
    faults = storage.faults() if isinstance(storage, Examined) else []
    grave = [fault for fault in faults if fault.severity is Severity.ERROR]
    if grave:
        await storage.disconnect()
        raise ServerUnfit(f"{grave[0].found}; {grave[0].advice}, or allow it: `allow_eviction`")


LOOKED_AT: Final = 100
"""How many jobs a look sees; the rest waits for its turn behind them."""
NAMES_WARNED_OF: Final = 100


class UnservedNames:
    """Looks now and then, while the worker `is_idle`, for jobs that it has no handler for."""

    def __init__(
        self, storage: Storage, served: Collection[str], *, interval: timedelta, is_idle: Callable[[], bool]
    ) -> None:
        self._storage = storage
        self._served = served
        self._interval = interval.total_seconds()
        self._is_idle = is_idle
        self._seen: dict[str, str] = {}  # the names of the jobs that the last look saw, by their ids
        self._warned: set[str] = set()

    async def run(self) -> None:
        """Look until cancelled."""
        while ANY_NAME not in self._served and len(self._warned) < NAMES_WARNED_OF:
            await asyncio.sleep(self._interval)
            if self._is_idle():
                await self._try_to_look()
            else:
                self._seen = {}
        await asyncio.Event().wait()

    async def _try_to_look(self) -> None:
        try:
            await self.look()
        except (StorageUnavailable, StorageError):
            self._seen = {}  # the claim loop reports it

    async def look(self) -> None:
        """Warn of the names of jobs that were queued at the last look as well, unless one of them runs."""
        queued = (await self._storage.list(JobState.QUEUED, limit=LOOKED_AT)).jobs
        strange = {one.id: one.name for one in queued if one.name not in self._served}
        waiting = {name for job_id, name in strange.items() if self._seen.get(job_id) == name} - self._warned
        self._seen = strange
        if waiting and not await self._storage.is_paused():
            running = {one.name for one in (await self._storage.list(JobState.PROCESSING, limit=LOOKED_AT)).jobs}
            for name in sorted(waiting - running):
                self._warn(name)

    def _warn(self, name: str) -> None:
        self._warned.add(name)
        logger.warning(
            "jobs named %r wait in queue %r, and no worker takes them: this one has handlers for %s; enqueue them under"
            ' one of these names, add a handler (or "*" for every other name), or start the worker that has it',
            log_line(name),
            self._storage.queue,
            sorted(map(log_line, self._served)),
        )


class UnhandledNames:
    """The names under which a queue that has handlers enqueues jobs that none of them takes."""

    def __init__(self, queue: str) -> None:
        self._queue = queue
        self._warned: set[str] = set()

    def look_at(self, name: str, served: Collection[str]) -> None:
        """Warn of a name that the handlers `served` do not take."""
        known = name in served or ANY_NAME in served or name in self._warned
        if known or len(self._warned) >= NAMES_WARNED_OF:
            return
        self._warned.add(name)
        logger.warning(
            "a job named %r is enqueued in queue %r, whose handlers here are for %s: unless another process has one for"
            ' that name, it waits for ever; pass name=, or add a handler (or "*" for every other name)',
            log_line(name),
            self._queue,
            sorted(map(log_line, served)),
        )
