"""Storages that end jobs, or let them go on, in a wrong way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from tests.workers.testing.broken_storages.fallible import Fallible, elsewhere
from workers.jobs import (
    Completed,
    Continued,
    JobOutcome,
    JobState,
    OutcomeKind,
    Released,
    Retried,
    Settlement,
    SettleOutcome,
    SettleStatus,
)
from workers.storage.memory.jobs import StoredJob

APPLIED = SettleOutcome(status=SettleStatus.APPLIED)


class NoTokenCheck(Fallible):
    """Whoever settles a running job ends its attempt."""

    def _settle(self, settlement: Settlement, now: datetime) -> SettleOutcome:
        job = self._table.find(settlement.claim.job_id, now)
        if job is not None and job.token is not None:
            settlement = replace(settlement, claim=replace(settlement.claim, token=job.token))
        return super()._settle(settlement, now)


class ResultAfterState(Fallible):
    """Completes the job in one step and stores its result in the next."""

    async def settle(self, settlements: Sequence[Settlement]) -> list[SettleOutcome]:
        bare = [replace(one, result=b"") if isinstance(one, Completed) else one for one in settlements]
        outcomes = await super().settle(bare)
        await elsewhere()
        for one in settlements:
            job = self._table.find(one.claim.job_id, self._now())
            if isinstance(one, Completed) and job is not None and job.settled_by == one.claim.token:
                job.result = one.result
        return outcomes


class StateAfterResult(Fallible):
    """Stores the result in one step and completes the job in the next."""

    async def settle(self, settlements: Sequence[Settlement]) -> list[SettleOutcome]:
        for one in settlements:
            job = self._table.find(one.claim.job_id, self._now())
            if isinstance(one, Completed) and job is not None and job.token == one.claim.token:
                job.result = one.result
        await elsewhere()
        return await super().settle(settlements)

    async def result(self, job_id: str) -> JobOutcome | None:
        job = self._table.find(job_id, self._now())
        if job is not None and job.result is not None:
            return JobOutcome(kind=OutcomeKind.COMPLETED, result=job.result)
        return await super().result(job_id)


class ContinuationAfterState(Fallible):
    """Completes the job in one step and enqueues its continuation in the next."""

    async def settle(self, settlements: Sequence[Settlement]) -> list[SettleOutcome]:
        alone = [replace(one, then=None) if isinstance(one, Completed) else one for one in settlements]
        outcomes = await super().settle(alone)
        await elsewhere()
        for one, outcome in zip(settlements, outcomes, strict=True):
            if isinstance(one, Completed) and one.then is not None and outcome == APPLIED:
                self._enqueue(one.then, {}, self._now())
        return outcomes


class ContinuationLost(Fallible):
    """Forgets the continuation of a job that is not kept."""

    def _settle(self, settlement: Settlement, now: datetime) -> SettleOutcome:
        outcome = super()._settle(settlement, now)
        if isinstance(settlement, Completed) and settlement.then is not None:
            job = self._table.find(settlement.then.id, now)
            if job is not None and self._table.find(settlement.claim.job_id, now) is None:
                self._table.drop(job)
        return outcome


class ContinuedWithOldAttempts(Fallible):
    """The next link of a chain begins with the attempts of the last."""

    def _settle(self, settlement: Settlement, now: datetime) -> SettleOutcome:
        outcome = super()._settle(settlement, now)
        job = self._table.find(settlement.claim.job_id, now)
        if isinstance(settlement, Continued) and outcome == APPLIED and job is not None:
            job.attempts = settlement.claim.attempt
        return outcome


class ContinuedByAnybody(Fallible):
    """Whoever once had a running job may say what it goes on as."""

    def _settle(self, settlement: Settlement, now: datetime) -> SettleOutcome:
        job = self._table.find(settlement.claim.job_id, now)
        if isinstance(settlement, Continued) and job is not None and job.token is not None:
            settlement = replace(settlement, claim=replace(settlement.claim, token=job.token))
        return super()._settle(settlement, now)


class ReleasedToTheEnd(Fallible):
    """A released job queues behind all others."""

    def _settle(self, settlement: Settlement, now: datetime) -> SettleOutcome:
        job = self._table.find(settlement.claim.job_id, now)
        if isinstance(settlement, Released) and job is not None:
            self._table._next_serial += 1
            job.serial = self._table._next_serial
        return super()._settle(settlement, now)


class RepeatsAreLost(Fallible):
    """Calls a settlement lost whose first answer did not arrive."""

    def _settle(self, settlement: Settlement, now: datetime) -> SettleOutcome:
        outcome = super()._settle(settlement, now)
        job = self._table.find(settlement.claim.job_id, now)
        if job is not None and job.settled_by is not None:
            job.settled_by = "forgotten"
        return outcome


class KeyHeldWhileWaiting(Fallible):
    """A job that waits for its retry keeps the others of its ordering key waiting."""

    def _retry(self, job: StoredJob, settlement: Retried, now: datetime) -> None:
        super()._retry(job, settlement, now)
        if job.new.ordering_key is not None and job.state is JobState.FAILING:
            self._table._busy_keys.add(job.new.ordering_key)
