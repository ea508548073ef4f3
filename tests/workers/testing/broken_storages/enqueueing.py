"""Storages that are wrong about ids and deduplication keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from tests.workers.testing.broken_storages.fallible import Fallible, elsewhere
from workers.clock import Clock
from workers.deduplication import DeduplicationMode
from workers.jobs import (
    Claim,
    EnqueueResult,
    EnqueueStatus,
    JobState,
    NewJob,
    Settlement,
    SettleOutcome,
)
from workers.storage.memory import MemorySpace
from workers.storage.memory.jobs import StoredJob
from workers.storage.memory.line import KeyHolder


class EnqueueRace(Fallible):
    """Looks whether the id is free in one step and inserts in the next."""

    async def enqueue(self, jobs: Sequence[NewJob], *, connection: object | None = None) -> list[EnqueueResult]:
        now = self._now()
        free = {new.id for new in jobs if self._table.find(new.id, now) is None}
        await elsewhere()
        for new in jobs:
            job = self._table.find(new.id, now)
            if new.id in free and job is not None and job.state is JobState.QUEUED:
                self._table.drop(job)
        return await super().enqueue(jobs, connection=connection)


class OldGenerationLingers(Fallible):
    """A new generation inherits the attempts of the one that failed."""

    def _enqueue(self, new: NewJob, groups: dict[str, KeyHolder | None], now: datetime) -> EnqueueResult:
        old = self._table.find(new.id, now)
        answer = super()._enqueue(new, groups, now)
        job = self._table.find(new.id, now)
        if answer.status is EnqueueStatus.QUEUED and old is not None and job is not None:
            job.attempts = old.attempts
        return answer


class KeyKeptByTheClaim(Fallible):
    """A claim leaves a debounced key with its job, whose payload the next enqueue changes."""

    def _grant(self, job: StoredJob, worker_id: str, leases: Mapping[str, timedelta], now: datetime) -> Claim:
        if job.new.deduplication is not None and job.new.deduplication.mode is DeduplicationMode.DEBOUNCE:
            key = job.new.deduplication.key
            if self._table.holder_of(key, now) is None:
                self._table.give(key, KeyHolder(job_id=job.new.id, mode=DeduplicationMode.SIMPLE))
        return super()._grant(job, worker_id, leases, now)


class KeyOfNobody(Fallible):
    """By `simple` a key stays taken when its job is gone."""

    def _settle(self, settlement: Settlement, now: datetime) -> SettleOutcome:
        job = self._table.find(settlement.claim.job_id, now)
        key = None if job is None or job.new.deduplication is None else job.new.deduplication.key
        holder = None if key is None else self._table.holder_of(key, now)
        outcome = super()._settle(settlement, now)
        if key is not None and holder is not None and self._table.holder_of(key, now) is None:
            self._table.give(key, holder)
        return outcome


class FirstPayloadStays(Fallible):
    """A debounce starts the wait anew, for the first payload."""

    def _enqueue(self, new: NewJob, groups: dict[str, KeyHolder | None], now: datetime) -> EnqueueResult:
        answer = super()._enqueue(new, groups, now)
        job = self._table.find(answer.id, now)
        if answer.id == new.id and job is not None:
            self._first.setdefault(new.id, new.payload)
        elif job is not None and job.state is JobState.SCHEDULED:
            job.new = replace(job.new, payload=self._first[answer.id])
        return answer

    def __init__(self, space: MemorySpace | None = None, queue: str = "default", *, clock: Clock | None = None) -> None:
        super().__init__(space, queue, clock=clock)
        self._first: dict[str, bytes] = {}


class GroupsAreSplit(Fallible):
    """Of jobs that share a key in one call only the first is inserted."""

    def _enqueue(self, new: NewJob, groups: dict[str, KeyHolder | None], now: datetime) -> EnqueueResult:
        return super()._enqueue(new, {}, now)


class KeyRace(Fallible):
    """Looks whether the deduplication key is free in one step and takes it in the next."""

    async def enqueue(self, jobs: Sequence[NewJob], *, connection: object | None = None) -> list[EnqueueResult]:
        keys = {new.deduplication.key for new in jobs if new.deduplication is not None}
        free = [key for key in keys if self._table.holder_of(key, self._now()) is None]
        await elsewhere()
        for key in free:
            self._table.give(key, None)
        return await super().enqueue(jobs, connection=connection)


class ThrottleEndsWithItsJob(Fallible):
    """Whatever the mode, a deduplication key is free once its job was settled."""

    def _settle(self, settlement: Settlement, now: datetime) -> SettleOutcome:
        for key, holder in list(self._table._holders.items()):
            if holder.job_id == settlement.claim.job_id:
                self._table.give(key, None)
        return super()._settle(settlement, now)


class UrgentLast(Fallible):
    """Knows priorities by their size alone, as one that keeps them as numbers without a sign."""

    def _enqueue(self, new: NewJob, groups: dict[str, KeyHolder | None], now: datetime) -> EnqueueResult:
        return super()._enqueue(replace(new, priority=abs(new.priority)), groups, now)
