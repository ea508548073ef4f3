"""Storages that are wrong about whom they wake, hear or tell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from datetime import datetime, timedelta

from tests.workers.testing.broken_storages.fallible import Fallible, elsewhere
from workers.clock import Clock
from workers.jobs import (
    CancelResult,
    Completed,
    EnqueueResult,
    JobState,
    NewJob,
    ProgressReport,
    Settlement,
    SettleOutcome,
)
from workers.lifecycle import Step
from workers.storage.memory import MemorySpace
from workers.storage.subscribers import BufferedSubscription


class LostWakeUp(Fallible):
    """Looks first and listens afterwards: what comes in between wakes nobody."""

    async def wait(self, names: Collection[str], *, timeout: timedelta) -> None:
        if not self._claimable(names):
            await elsewhere()
            await self._queue.sleep(timeout.total_seconds())


class SpinningWait(Fallible):
    """Never waits."""

    async def wait(self, names: Collection[str], *, timeout: timedelta) -> None:
        await elsewhere()


class FarewellUnheard(Fallible):
    """Lists workers that have stopped."""

    async def farewell(self, worker_id: str) -> None:
        await elsewhere()


class CancelIgnoredWhileScheduled(Fallible):
    """Tells the waiters of a scheduled job that it is cancelled, hides it, and runs it when it is due."""

    async def cancel(self, job_id: str) -> CancelResult:
        job = self._table.find(job_id, self._now())
        if job is None or job.state is not JobState.SCHEDULED:
            return await super().cancel(job_id)
        await super().cancel(job_id)
        due = job.run_at - self._now()
        asyncio.get_running_loop().call_soon(self._table.add, replace(job.new, delay=due), self._now())
        return CancelResult.CANCELLED


class SilentCancel(Fallible):
    """Cancels, and leaves those who wait for the job waiting."""

    async def cancel(self, job_id: str) -> CancelResult:
        now = self._now()
        job = self._table.find(job_id, now)
        if job is None or not job.waits:
            return await super().cancel(job_id)
        self._table._take(job, Step.CANCEL)
        job.finished_at = now
        self._table.keep(job, now + timedelta(hours=1))
        return CancelResult.CANCELLED


class UnheardRequests(Fallible):
    """Tells of cancel requests by renewals alone."""

    @asynccontextmanager
    async def cancel_requests(self) -> AsyncIterator[BufferedSubscription]:
        yield BufferedSubscription()


class ForgottenRequests(Fallible):
    """Keeps the newest cancel requests for a worker that does not read, and says nothing of the others."""

    @asynccontextmanager
    async def cancel_requests(self) -> AsyncIterator[BufferedSubscription]:
        async with super().cancel_requests() as requests:
            requests.miss = lambda why: None
            yield requests


class ProgressOfAnybody(Fallible):
    """Takes a report from whoever once had the job."""

    async def progress(self, reports: Sequence[ProgressReport]) -> None:
        for report in reports:
            job = self._table.find(report.claim.job_id, self._now())
            if job is not None:
                self._table.report(job, report.value)


class ResultLeftBehind(Fallible):
    """Tells of the end of a job without the result that nobody can read any more."""

    @asynccontextmanager
    async def subscribe(self, job_id: str) -> AsyncIterator[BufferedSubscription]:
        async with super().subscribe(job_id) as subscription:
            put = subscription.put
            subscription.put = lambda event: put(replace(event, result=None))
            yield subscription


class LargeResultGone(Fallible):
    """Keeps a result for as short as it was asked to, though it is too large for the event of the end."""

    def _settle(self, settlement: Settlement, now: datetime) -> SettleOutcome:
        if isinstance(settlement, Completed) and isinstance(settlement.claim.keep_completed, timedelta):
            object.__setattr__(settlement, "keep", settlement.claim.keep_completed)
        return super()._settle(settlement, now)


class HeldWakeUpForgotten(Fallible):
    """Wakes nobody at the end of a block in which jobs were enqueued."""

    async def _wake_for(self, _: Collection[str]) -> None:
        pass


class HeldForEverybody(Fallible):
    """Wakes nobody for the jobs of others either while a block is open."""

    def __init__(self, space: MemorySpace | None = None, queue: str = "default", *, clock: Clock | None = None) -> None:
        super().__init__(space, queue, clock=clock)
        self._blocks = 0

    @asynccontextmanager
    async def with_notify(self, connection: object | None = None) -> AsyncIterator[None]:
        self._blocks += 1
        try:
            async with super().with_notify(connection):
                yield
        finally:
            self._blocks -= 1

    async def enqueue(self, jobs: Sequence[NewJob], *, connection: object | None = None) -> list[EnqueueResult]:
        with self._queue.quiet() if self._blocks else nullcontext():
            return self._queue.enqueue(jobs, self._now())
