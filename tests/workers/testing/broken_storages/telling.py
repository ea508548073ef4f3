"""Storages that are wrong about whom they wake, hear or tell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta

from tests.workers.testing.broken_storages.fallible import Fallible, elsewhere
from workers.jobs import (
    CancelResult,
    JobState,
    ProgressReport,
)
from workers.lifecycle import Step
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
