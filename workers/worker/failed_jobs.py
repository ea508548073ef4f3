"""Who is told of every job that fails for good, whether its worker ends it or a reaper.

The record is kept, so that what nobody could be told is still found by `Management.failed`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Final, TypeAlias

from workers.details import JobDetails, JobReader
from workers.errors import WorkersError
from workers.jobs import Claim, Failed, JobRecord, JobState, JobStatus

logger = logging.getLogger(__name__)

OnFailed: TypeAlias = Callable[[JobDetails], Awaitable[None] | None]
"""Called with each job that has failed for good, once that is stored; at least once, and not after a crash.

It has 5 s, in which the job keeps its slot. What it raises is logged and goes no further.
"""

PATIENCE: Final = timedelta(seconds=5)


class FailedJobs:
    """Tells one function of the jobs of one queue that failed."""

    def __init__(self, reader: JobReader, on_failed: OnFailed) -> None:
        self._reader = reader
        self._on_failed = on_failed

    async def tell_of(self, claim: Claim, settlement: Failed) -> None:
        """Tell of a job whose end was just stored."""
        await self._within([claim.job_id], self._tell_of(claim, settlement))

    async def tell(self, records: Sequence[JobRecord]) -> None:
        """Tell of jobs that a reaper has failed."""
        await self._within([record.status.id for record in records], self._tell(records))

    async def _tell_of(self, claim: Claim, settlement: Failed) -> None:
        found = None
        try:
            [found] = await self._reader.storage.read([claim.job_id])
        except WorkersError as error:
            logger.debug("job %r cannot be read: %s", claim.job_id, type(error).__name__)
        # A record that was dropped, or is of the next generation, says nothing of this end.
        kept = found is not None and found.status.state is JobState.FAILED
        await self._tell([found if found is not None and kept else _record_of(claim, settlement)])

    async def _tell(self, records: Sequence[JobRecord]) -> None:
        for record in records:
            answer = self._on_failed(self._reader.details(record))
            if inspect.isawaitable(answer):
                await answer

    async def _within(self, ids: Sequence[str], telling: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(PATIENCE.total_seconds()):
                await telling
        except Exception:  # a bug there must not end the worker, and the job has failed anyway
            logger.exception("on_failed was not told, or not of all, of the failed jobs %s", list(ids))


def _record_of(claim: Claim, settlement: Failed) -> JobRecord:
    """Return what the claim itself tells of a job whose record is gone."""
    status = JobStatus(
        id=claim.job_id,
        name=claim.name,
        state=JobState.FAILED,
        attempt=claim.attempt,
        max_attempts=claim.max_attempts,
        created_at=claim.created_at,
        priority=claim.priority,
        chain_index=claim.chain_index,
        last_error=settlement.error,
    )
    return JobRecord(status=status, payload=claim.payload)
