"""The reaper: it gives back what crashed workers held, and removes records whose retention is over."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from datetime import timedelta

from workers.errors import StorageError, StorageUnavailable
from workers.storage.base import Storage
from workers.worker.events import Emitter, Observer, WorkerEventKind
from workers.worker.set_aside import SetAsideReporter

BATCH = 1_000
"""How many leases one call recovers at most; a pass goes on until a call recovers fewer."""
SWEPT_AT_ONCE = 200
"""How many records one call removes at most. A claim may have to wait for it: some milliseconds on every storage."""


class Reaper:
    """Recovers and sweeps one queue every `interval` (default 15 s, half of the default lease), on its own clock.

    On a storage with a shorter `limits.recovery_interval` it recovers that often.

    Any number of reapers may run on a queue. One runs beside every worker; alone, `run` it as a task and cancel it.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        interval: timedelta = timedelta(seconds=15),
        max_stalls: int = 3,
        observers: Sequence[Observer] = (),
        name: str = "reaper",
    ) -> None:
        self._storage = storage
        often = min(interval, storage.limits.recovery_interval or interval)
        self._recovery_interval = often.total_seconds()
        self._passes_per_sweep = max(1, round(interval / max(often, timedelta.resolution)))
        self._max_stalls = max_stalls
        self._events = Emitter(observers, queue=storage.queue, worker_id=name)
        self._news = SetAsideReporter(storage, self._events)

    async def run(self) -> None:
        """Reap until cancelled.

        A storage that does not answer, or answers with an error, is reported and asked again next time.
        """
        for number in itertools.count():
            try:
                await (self._recover() if number % self._passes_per_sweep else self.reap())
            except (StorageUnavailable, StorageError) as error:  # an error may be about one job among thousands
                self._events.report(error)
            # Jittered, so that many reapers do not come at the same moment.
            pause = self._recovery_interval * random.uniform(0.9, 1.0)  # noqa: S311 - spreads load, guards nothing
            await asyncio.sleep(pause)

    async def reap(self) -> None:
        """Run one pass: recover every lease that has expired by now, remove every expired record.

        However many records expired at once, the storage is left to others half of the time, and leases that expire
        meanwhile are still recovered.
        """
        clock = asyncio.get_running_loop().time
        await self._recover()
        recovered = started = clock()
        while await self._storage.sweep(SWEPT_AT_ONCE) >= SWEPT_AT_ONCE:
            await asyncio.sleep(clock() - started)
            if clock() - recovered >= self._recovery_interval:
                await self._recover()
                recovered = clock()
            started = clock()

    async def _recover(self) -> None:
        try:
            while await self._recover_some() >= BATCH:
                pass
        finally:
            self._news.tell()

    async def _recover_some(self) -> int:
        recovery = await self._storage.recover(BATCH, max_stalls=self._max_stalls)
        if recovery.requeued:
            self._events.emit(WorkerEventKind.STALLED, job_ids=recovery.requeued)
        if recovery.failed:
            self._events.emit(WorkerEventKind.FAILED, job_ids=recovery.failed)
        return len(recovery.requeued) + len(recovery.failed)
