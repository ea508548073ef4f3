"""Storages that are wrong about jobs that follow others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from tests.workers.testing.broken_storages.fallible import Fallible, elsewhere
from workers.jobs import CancelResult, EnqueueResult, NewJob, Settlement, SettleOutcome
from workers.storage.memory.line import KeyHolder


class FollowsNobody(Fallible):
    """Takes jobs that are to follow others, and lets them run at once."""

    def _enqueue(self, new: NewJob, groups: dict[str, KeyHolder | None], now: datetime) -> EnqueueResult:
        return super()._enqueue(replace(new, after=()), groups, now)


class ReleaseRace(Fallible):
    """Looks who is the last to wait for, and ends it afterwards: of two that end at once neither is the last."""

    async def settle(
        self, settlements: Sequence[Settlement], *, connection: object | None = None
    ) -> list[SettleOutcome]:
        table = self._queue.table
        not_last = {job_id for job_id, left in table._left.items() if len(left) > len(settlements)}
        await elsewhere()
        outcomes = await super().settle(settlements, connection=connection)
        for job_id in not_last:
            job = table._jobs.get(job_id)
            if job is not None and job.line is not None:  # released by this step: it waits for ever
                table._step_out(job)
        return outcomes


class CancelStrands(Fallible):
    """Cancels a job, and leaves those that follow it waiting."""

    async def cancel(self, job_id: str) -> CancelResult:
        table = self._queue.table
        table._resolving = True
        answer = await super().cancel(job_id)
        table._resolving = False
        table._ended.clear()
        return answer
