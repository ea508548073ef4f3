"""Storages that are wrong about leases, attempts and how long records are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from tests.workers.testing.broken_storages.fallible import Fallible, elsewhere
from workers.jobs import (
    Claim,
    Completed,
    Failed,
    JobState,
    Recovery,
    Renewal,
    Settlement,
    SettleOutcome,
)
from workers.storage.memory.jobs import StoredJob

YEARS = timedelta(days=3650)


class AttemptCountedAtTheEnd(Fallible):
    """An attempt counts when it is settled: who dies in it was never there."""

    def _grant(self, job: StoredJob, worker_id: str, leases: Mapping[str, timedelta], now: datetime) -> Claim:
        claim = super()._grant(job, worker_id, leases, now)
        job.attempts -= 1
        return claim

    def _settle(self, settlement: Settlement, now: datetime) -> SettleOutcome:
        job = self._table.find(settlement.claim.job_id, now)
        if job is not None and job.token == settlement.claim.token:
            job.attempts += 1
        return super()._settle(settlement, now)


class StallsNotCounted(Fallible):
    """A job may kill one worker after another."""

    async def recover(self, limit: int, *, max_stalls: int = 3) -> Recovery:
        return await super().recover(limit, max_stalls=1_000_000)


class DoubleRecovery(Fallible):
    """Finds the expired leases in one step and brings the jobs back in the next, whoever did so meanwhile."""

    async def recover(self, limit: int, *, max_stalls: int = 3) -> Recovery:
        now = self._now()
        expired = [
            job
            for job in self._table.by_state[JobState.PROCESSING].values()
            if job.deadline is not None and job.deadline <= now
        ][:limit]
        await elsewhere()
        mine = await super().recover(limit, max_stalls=max_stalls)
        stolen = tuple(job.new.id for job in expired if job.new.id not in mine.requeued + mine.failed)
        return replace(mine, requeued=mine.requeued + stolen)


class RenewsWhatIsLost(Fallible):
    """Tells no worker that its job is somebody else's."""

    async def renew(self, claims: Sequence[Claim]) -> Renewal:
        return replace(await super().renew(claims), lost={})


class ExpiresWithNeighbours(Fallible):
    """One expiry for all results: whatever is settled last sets it."""

    def _settle(self, settlement: Settlement, now: datetime) -> SettleOutcome:
        outcome = super()._settle(settlement, now)
        keep = settlement.claim.keep_completed
        for job in self._table.by_state[JobState.COMPLETED].values():
            if isinstance(keep, timedelta):
                self._table.keep(job, now + keep)
        return outcome


class SweepsNeighbours(Fallible):
    """Once one result has expired, a sweep takes all of them."""

    async def sweep(self, limit: int) -> int:
        removed = await super().sweep(limit)
        for job in list(self._table.by_state[JobState.COMPLETED].values()) if removed else ():
            self._table.expire(job)
        return removed


class RetentionIgnored(Fallible):
    """Keeps every record for ever."""

    def _settle(self, settlement: Settlement, now: datetime) -> SettleOutcome:
        outcome = super()._settle(settlement, now)
        job = self._table.find(settlement.claim.job_id, now)
        if job is not None and job.finished:
            self._table.keep(job, now + YEARS)
        return outcome


class KeepIgnored(Fallible):
    """A settlement's own retention counts for nothing."""

    def _settle(self, settlement: Settlement, now: datetime) -> SettleOutcome:
        if isinstance(settlement, Completed | Failed):
            settlement = replace(settlement, keep=None)
        return super()._settle(settlement, now)
