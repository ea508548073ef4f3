"""What every worker does for its queue beside its jobs, as one of them suffices: it recovers, sweeps, and ticks crons.

The reaper gives back what crashed workers held, removes old records, and tells of what was set aside. The ticker
enqueues what recurs when it is due.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Final

from workers.clock import monotonic
from workers.crons import Cron
from workers.crons.book import store
from workers.crons.ticks import tick
from workers.details import READ_AT_ONCE, JobReader
from workers.errors import StorageError, StorageUnavailable
from workers.jobs import CronRow, JobRecord, JobState
from workers.serde import JsonSerde, Serde
from workers.storage.abilities import KeepsCrons, Repairable
from workers.storage.base import Storage
from workers.worker.events import Emitter, Observer, WorkerEventKind
from workers.worker.failures import FailedJobs, OnFailed


class SetAsideReporter:
    """Reports what one storage has set aside since it was last asked, as events."""

    def __init__(self, storage: Storage, events: Emitter) -> None:
        self._storage = storage if isinstance(storage, Repairable) else None
        self._events = events

    def tell(self) -> None:
        """Emit an event for each."""
        if self._storage is None:
            return
        for one in self._storage.news():
            error = StorageError(f"{one.id!r} was set aside: {one.reason}")
            self._events.emit(WorkerEventKind.SET_ASIDE, job_ids=(one.id,), error=error)


BATCH = 1_000
"""How many leases one call recovers at most; a pass goes on until a call recovers fewer."""
SWEPT_AT_ONCE = 200
"""How many records one call removes at most. A claim may have to wait for it: some milliseconds on every storage."""


class Reaper:
    """Recovers and sweeps one queue every `interval` (default 15 s, half of the default lease), on its own clock.

    On a storage with a shorter `capabilities.recovery_interval` it recovers that often.

    Any number of reapers may run on a queue. One runs beside every worker; alone, `run` it as a task and cancel it.
    `on_failed` is called with each job that it fails, see `OnFailed`; with the payload as `payload_serde` decodes it.
    `events` is what tells the observers of a worker that it runs beside, and `renew` renews that worker's leases: a
    process, or a machine with all its processes, may have stood still for longer than them, and nobody is dead.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        interval: timedelta = timedelta(seconds=15),
        max_stalls: int = 3,
        observers: Sequence[Observer] = (),
        name: str = "reaper",
        on_failed: OnFailed | None = None,
        payload_serde: Serde | None = None,
        events: Emitter | None = None,
        renew: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._storage = storage
        self._renew = renew
        often = min(interval, storage.capabilities.recovery_interval or interval)
        self._recovery_interval = often.total_seconds()
        self._passes_per_sweep = max(1, round(interval / max(often, timedelta.resolution)))
        self._max_stalls = max_stalls
        self._events = events or Emitter(observers, queue=storage.queue, worker_id=name)
        reader = JobReader(storage, payload_serde or JsonSerde(), JsonSerde())
        self._failed = None if on_failed is None else FailedJobs(reader, on_failed)
        self._reads = self._events.has_observers or self._failed is not None
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
            await self._rest()

    async def _rest(self) -> None:
        """Sleep until the next pass; once more if that took twice as long: who stood still, too, renews first."""
        for _ in range(2):
            # Jittered, so that many reapers do not come at the same moment.
            pause = self._recovery_interval * random.uniform(0.9, 1.0)  # noqa: S311 - spreads load, guards nothing
            began = monotonic()
            await asyncio.sleep(pause)
            if monotonic() - began < 2 * pause:
                return

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
        await self._renew_own()
        try:
            while await self._recover_some() >= BATCH:
                pass
        finally:
            self._news.tell()

    async def _renew_own(self) -> None:
        try:
            if self._renew is not None:
                await self._renew()
        except (StorageUnavailable, StorageError) as error:  # what others held is recovered all the same
            self._events.report(error)

    async def _recover_some(self) -> int:
        recovery = await self._storage.recover(BATCH, max_stalls=self._max_stalls)
        if recovery.requeued:
            self._events.emit(WorkerEventKind.STALLED, job_ids=recovery.requeued)
        for start in range(0, len(recovery.failed), READ_AT_ONCE):
            await self._report_failed(recovery.failed[start : start + READ_AT_ONCE])
        return len(recovery.requeued) + len(recovery.failed)

    async def _report_failed(self, ids: tuple[str, ...]) -> None:
        records = await self._read(ids) if self._reads else ()
        self._events.emit(WorkerEventKind.FAILED, job_ids=ids, records=records)
        if self._failed is not None:
            await self._failed.tell(records)

    async def _read(self, ids: tuple[str, ...]) -> tuple[JobRecord, ...]:
        """Return what is kept of the failed jobs, nothing if that cannot be read now."""
        try:
            found = await self._storage.read(ids)
        except (StorageUnavailable, StorageError) as error:
            self._events.report(error)
            return ()
        return tuple(one for one in found if one is not None and one.status.state is JobState.FAILED)


LOOK_SECONDS: Final = 30.0
"""How long a worker relies on what it last saw; somebody may have declared more meanwhile."""
SHORTEST_PAUSE_SECONDS: Final = 0.01


class Ticker:
    """Stores what this worker's process declared, then looks whenever something is due, and every 30 s at least."""

    def __init__(self, storage: Storage, crons: Iterable[Cron], *, report: Callable[[Exception], None]) -> None:
        self._storage = storage
        self._declared = tuple(crons)
        self._report = report

    async def run(self) -> None:
        """Tick until cancelled. A storage without `capabilities.crons` is left alone."""
        if not self._storage.capabilities.crons:
            await asyncio.Event().wait()
        while True:
            pause = LOOK_SECONDS
            try:
                pause = 0.0 if await self._declare() else await self.tick()
            except (StorageUnavailable, StorageError) as error:
                self._report(error)
            # Jittered, so that many workers do not come at the same moment, but never early.
            pause = max(min(pause, LOOK_SECONDS), SHORTEST_PAUSE_SECONDS)
            await asyncio.sleep(pause * random.uniform(1.0, 1.001))  # noqa: S311 - spreads load, guards nothing

    async def _declare(self) -> bool:
        """Store what is not stored yet, each for itself; tell whether something was."""
        declared, self._declared = self._declared, ()
        for at, cron in enumerate(declared):
            try:
                await store(self._storage, [cron])
            except StorageUnavailable:
                self._declared += declared[at:]
                raise
            except StorageError as error:  # a newer version wrote it
                self._report(error)
        return bool(declared)

    async def tick(self) -> float:
        """Tick what is due, and return how many seconds later to look again.

        What a storage repeats by itself is left to it.
        """
        if not isinstance(self._storage, KeepsCrons):
            return LOOK_SECONDS
        look = await self._storage.crons(due=True)
        ticked = [await self._tick(self._storage, row, look.now) for row in look.rows]
        if any(ticked):
            return 0
        if ticked:
            return await self._until_others_are_due(self._storage)
        return LOOK_SECONDS if look.next_due is None else (look.next_due - look.now).total_seconds()

    async def _tick(self, storage: KeepsCrons, row: CronRow, now: datetime) -> bool:
        """Tick one row, or leave it to whoever did, or can; tell whether it can tick here."""
        try:
            following = tick(row, now)
            await storage.replace_cron(following.row, jobs=following.jobs)
        except StorageError as error:  # about this row, or a job of it: the others must go on
            self._report(error)
            return False
        return True

    async def _until_others_are_due(self, storage: KeepsCrons) -> float:
        """Return how many seconds later something will be due, beside what is due and cannot tick here."""
        look = await storage.crons()
        later = (row.due for row in look.rows if row.due is not None and row.due > look.now)
        return min(((due - look.now).total_seconds() for due in later), default=LOOK_SECONDS)
