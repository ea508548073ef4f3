"""Storages that are wrong in one way each, as a hasty author of a new one might be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta

from workers.clock import Clock
from workers.deduplication import DeduplicationMode
from workers.jobs import (
    CancelResult,
    Claim,
    Completed,
    Continued,
    EnqueueResult,
    EnqueueStatus,
    Failed,
    JobOutcome,
    JobState,
    NewJob,
    OutcomeKind,
    ProgressReport,
    Recovery,
    Released,
    Renewal,
    Retried,
    Settlement,
    SettleOutcome,
    SettleStatus,
)
from workers.storage.base import TOMBSTONE
from workers.storage.memory import MemorySpace, MemoryStorage
from workers.storage.memory.jobs import Job, JobTable
from workers.storage.memory.keys import Mark
from workers.storage.memory.storage import MemoryQueue
from workers.storage.subscribers import BufferedSubscription

APPLIED = SettleOutcome(status=SettleStatus.APPLIED)
YEARS = timedelta(days=3650)


async def elsewhere() -> None:
    """Another client's turn, as between two round trips."""
    await asyncio.sleep(0)


class Fallible(MemoryStorage):
    """A storage in memory whose inner steps can be overridden, to be wrong in one of them."""

    def __init__(self, space: MemorySpace | None = None, queue: str = "default", *, clock: Clock | None = None) -> None:
        super().__init__(space, queue, clock=clock)
        for step in ("_settle", "_grant", "_enqueue", "_retry"):
            setattr(self._queue, step, getattr(self, step))

    @property
    def _table(self) -> JobTable:
        return self._queue.table

    def _claimable(self, names: Collection[str]) -> bool:
        return self._queue.claimable_in(names, self._now()) == timedelta(0)

    def _settle(self, settlement: Settlement, now: datetime) -> SettleOutcome:
        return MemoryQueue._settle(self._queue, settlement, now)

    def _grant(self, job: Job, worker_id: str, leases: Mapping[str, timedelta], now: datetime) -> Claim:
        return MemoryQueue._grant(self._queue, job, worker_id, leases, now)

    def _enqueue(self, new: NewJob, groups: dict[str, Mark | None], now: datetime) -> EnqueueResult:
        return MemoryQueue._enqueue(self._queue, new, groups, now)

    def _retry(self, job: Job, settlement: Retried, now: datetime) -> None:
        MemoryQueue._retry(self._queue, job, settlement, now)


class NoTokenCheck(Fallible):
    """Whoever settles a running job ends its attempt."""

    def _settle(self, settlement: Settlement, now: datetime) -> SettleOutcome:
        job = self._table.find(settlement.claim.job_id, now)
        if job is not None and job.token is not None:
            settlement = replace(settlement, claim=replace(settlement.claim, token=job.token))
        return super()._settle(settlement, now)


class LostWakeUp(Fallible):
    """Looks first and listens afterwards: what comes in between wakes nobody."""

    async def wait(self, names: Collection[str], *, timeout: timedelta) -> None:
        if not self._claimable(names):
            await elsewhere()
            await self._queue.sleep(timeout.total_seconds())


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


class AttemptCountedAtTheEnd(Fallible):
    """An attempt counts when it is settled: who dies in it was never there."""

    def _grant(self, job: Job, worker_id: str, leases: Mapping[str, timedelta], now: datetime) -> Claim:
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


class ReleasedToTheEnd(Fallible):
    """A released job queues behind all others."""

    def _settle(self, settlement: Settlement, now: datetime) -> SettleOutcome:
        job = self._table.find(settlement.claim.job_id, now)
        if isinstance(settlement, Released) and job is not None:
            self._table._next_serial += 1
            job.serial = self._table._next_serial
        return super()._settle(settlement, now)


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


class KeyKeptByTheClaim(Fallible):
    """A claim leaves a debounced key with its job, whose payload the next enqueue changes."""

    def _grant(self, job: Job, worker_id: str, leases: Mapping[str, timedelta], now: datetime) -> Claim:
        if job.new.deduplication is not None and job.new.deduplication.mode is DeduplicationMode.DEBOUNCE:
            key = job.new.deduplication.key
            if self._table.marked(key, now) is None:
                self._table.mark(key, Mark(job_id=job.new.id, mode=DeduplicationMode.SIMPLE))
        return super()._grant(job, worker_id, leases, now)


class KeyOfNobody(Fallible):
    """By `simple` a key stays taken when its job is gone."""

    def _settle(self, settlement: Settlement, now: datetime) -> SettleOutcome:
        job = self._table.find(settlement.claim.job_id, now)
        key = None if job is None or job.new.deduplication is None else job.new.deduplication.key
        mark = None if key is None else self._table.marked(key, now)
        outcome = super()._settle(settlement, now)
        if key is not None and mark is not None and self._table.marked(key, now) is None:
            self._table.mark(key, mark)
        return outcome


class FirstPayloadStays(Fallible):
    """A debounce starts the wait anew, for the first payload."""

    def _enqueue(self, new: NewJob, groups: dict[str, Mark | None], now: datetime) -> EnqueueResult:
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

    def _enqueue(self, new: NewJob, groups: dict[str, Mark | None], now: datetime) -> EnqueueResult:
        return super()._enqueue(new, {}, now)


class KeyRace(Fallible):
    """Looks whether the deduplication key is free in one step and takes it in the next."""

    async def enqueue(self, jobs: Sequence[NewJob], *, connection: object | None = None) -> list[EnqueueResult]:
        keys = {new.deduplication.key for new in jobs if new.deduplication is not None}
        free = [key for key in keys if self._table.marked(key, self._now()) is None]
        await elsewhere()
        for key in free:
            self._table.mark(key, None)
        return await super().enqueue(jobs, connection=connection)


class ThrottleEndsWithItsJob(Fallible):
    """Whatever the mode, a deduplication key is free once its job was settled."""

    def _settle(self, settlement: Settlement, now: datetime) -> SettleOutcome:
        for key, mark in list(self._table._marks.items()):
            if mark.job_id == settlement.claim.job_id:
                self._table.mark(key, None)
        return super()._settle(settlement, now)


class OldGenerationLingers(Fallible):
    """A new generation inherits the attempts of the one that failed."""

    def _enqueue(self, new: NewJob, groups: dict[str, Mark | None], now: datetime) -> EnqueueResult:
        old = self._table.find(new.id, now)
        answer = super()._enqueue(new, groups, now)
        job = self._table.find(new.id, now)
        if answer.status is EnqueueStatus.QUEUED and old is not None and job is not None:
            job.attempts = old.attempts
        return answer


class RenewsWhatIsLost(Fallible):
    """Tells no worker that its job is somebody else's."""

    async def renew(self, claims: Sequence[Claim]) -> Renewal:
        return replace(await super().renew(claims), lost={})


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

    def _retry(self, job: Job, settlement: Retried, now: datetime) -> None:
        super()._retry(job, settlement, now)
        if job.new.ordering_key is not None and job.state is JobState.FAILING:
            self._table._busy_keys.add(job.new.ordering_key)


class SilentCancel(Fallible):
    """Cancels, and leaves those who wait for the job waiting."""

    async def cancel(self, job_id: str) -> CancelResult:
        now = self._now()
        job = self._table.find(job_id, now)
        if job is None or not job.waits:
            return await super().cancel(job_id)
        self._table.drop(job)
        self._table._tombstones.add((now + TOMBSTONE,), job_id)
        return CancelResult.CANCELLED


class ProgressOfAnybody(Fallible):
    """Takes a report from whoever once had the job."""

    async def progress(self, reports: Sequence[ProgressReport]) -> None:
        for report in reports:
            job = self._table.find(report.claim.job_id, self._now())
            if job is not None:
                self._table.report(job, report.value)


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


class SpinningWait(Fallible):
    """Never waits."""

    async def wait(self, names: Collection[str], *, timeout: timedelta) -> None:
        await elsewhere()
