"""The reference storage: one process, no durability, every step taken from the transition table.

For tests of your own handlers, for conformance, and for work that may vanish with the process. One event loop at a
time; it is not thread-safe.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from workers.clock import Clock, ManualClock
from workers.errors import LossReason, Unsupported
from workers.jobs import (
    CancelResult,
    Claim,
    Completed,
    EnqueueResult,
    EnqueueStatus,
    Failed,
    JobEventKind,
    JobOutcome,
    JobState,
    JobStatus,
    NewJob,
    OutcomeKind,
    Page,
    Recovery,
    Renewal,
    Retried,
    Settlement,
    SettleOutcome,
    SettleStatus,
    WorkerInfo,
    check_retention,
    check_text,
)
from workers.lifecycle import Step
from workers.storage.base import ANY_NAME, Limits
from workers.storage.broadcast import BufferedSubscription
from workers.storage.memory_jobs import Job
from workers.storage.memory_space import MemorySpace
from workers.storage.rules import WORKER_RECORD, bounded, check_cleanable, count_retry, stalled_error

_APPLIED: Final = SettleOutcome(status=SettleStatus.APPLIED)
_ALREADY_APPLIED: Final = SettleOutcome(status=SettleStatus.ALREADY_APPLIED)


class MemoryStorage:
    """One queue in a space; without `space` it has one of its own, with the given clock.

    With a `ManualClock`, `wait` wakes for delayed jobs when the clock is advanced; its timeout is real time.
    """

    limits: Final = Limits(clock="machine", durable=False, processes="one", delay_resolution=timedelta(0))

    def __init__(self, space: MemorySpace | None = None, queue: str = "default", *, clock: Clock | None = None) -> None:
        if space is not None and clock is not None:
            raise ValueError("a space has its own clock: MemoryStorage(MemorySpace(clock))")
        check_text("queue name", queue)
        self._space = space or MemorySpace(clock)
        self._name = queue
        self._queue = self._space.queue(queue)
        self._table = self._queue.table

    def __repr__(self) -> str:
        return f"MemoryStorage(queue={self._name!r})"

    @property
    def queue(self) -> str:
        return self._name

    async def connect(self) -> None:
        """There is nothing to connect to; the space lives as long as something refers to it."""

    async def disconnect(self) -> None:
        """There is nothing to close."""

    async def enqueue(self, jobs: Sequence[NewJob], *, connection: object | None = None) -> list[EnqueueResult]:
        if connection is not None:
            raise Unsupported("MemoryStorage cannot join a transaction; enqueue without `connection`")
        now = self._now()
        return [self._enqueue(job, now) for job in jobs]

    def _enqueue(self, new: NewJob, now: datetime) -> EnqueueResult:
        job = self._table.find(new.id, now)
        if job is not None and job.state is JobState.COMPLETED:
            return EnqueueResult(id=new.id, status=EnqueueStatus.COMPLETED, existing_state=job.state, result=job.result)
        if job is not None and job.state is not JobState.FAILED:
            return EnqueueResult(id=new.id, status=EnqueueStatus.DUPLICATE, existing_state=job.state)
        self._table.add(new, now)
        return EnqueueResult(id=new.id, status=EnqueueStatus.QUEUED)

    async def claim(self, worker_id: str, *, leases: Mapping[str, timedelta], limit: int) -> list[Claim]:
        check_text("worker id", worker_id)
        now = self._now()
        self._table.ready_what_is_due(now)
        self._queue.seen[worker_id] = now
        if self._queue.paused:
            return []
        return [self._grant(job, worker_id, leases, now) for job in self._table.take(leases, limit)]

    def _grant(self, job: Job, worker_id: str, leases: Mapping[str, timedelta], now: datetime) -> Claim:
        new = job.new
        lease = leases[new.name] if new.name in leases else leases[ANY_NAME]
        token = next(self._queue.tokens)
        job.token, job.worker_id, job.deadline = token, worker_id, now + lease
        return Claim(
            job_id=new.id,
            name=new.name,
            payload=new.payload,
            token=token,
            worker_id=worker_id,
            lease=lease,
            attempt=job.attempts,
            max_attempts=new.max_attempts,
            created_at=job.created_at,
            keep_completed=new.keep_completed,
            keep_failed=new.keep_failed,
            priority=new.priority,
            backoff=new.backoff,
        )

    async def wait(self, names: Collection[str], *, timeout: timedelta) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout.total_seconds()
        await asyncio.sleep(0)  # a caller that finds work every time must not starve the loop
        while not self._claimable(names) and (left := deadline - clock()) > 0:
            await self._queue.sleep(min(left, self._until_due()))

    def _claimable(self, names: Collection[str]) -> bool:
        self._table.ready_what_is_due(self._now())
        return not self._queue.paused and self._table.claimable(names)

    def _until_due(self) -> float:
        due = self._table.next_due()
        if due is None or self._queue.paused or isinstance(self._space.clock, ManualClock):
            return float("inf")
        return max(0.0, (due - self._now()).total_seconds())

    async def renew(self, claims: Sequence[Claim]) -> Renewal:
        now = self._now()
        lost: dict[str, LossReason] = {}
        cancel_requested: list[str] = []
        for claim in claims:
            self._queue.seen[claim.worker_id] = now
            job = self._table.find(claim.job_id, now)
            if job is None or job.token != claim.token:
                lost[claim.token] = _why_lost(job)
                continue
            job.deadline = now + claim.lease
            if job.cancel_requested:
                cancel_requested.append(claim.token)
        return Renewal(lost=lost, cancel_requested=frozenset(cancel_requested))

    async def settle(self, settlements: Sequence[Settlement]) -> list[SettleOutcome]:
        now = self._now()
        return [self._settle(settlement, now) for settlement in settlements]

    def _settle(self, settlement: Settlement, now: datetime) -> SettleOutcome:
        claim = settlement.claim
        job = self._table.find(claim.job_id, now)
        if job is not None and job.settled_by == claim.token:
            return _ALREADY_APPLIED
        if job is None or job.token != claim.token:
            return SettleOutcome(status=SettleStatus.LOST, reason=_why_lost(job))
        match settlement:
            case Completed():
                self._table.complete(job, now, settlement.result, settlement.keep)
                if settlement.then is not None:
                    self._enqueue(settlement.then, now)
            case Retried():
                self._retry(job, settlement, now)
            case Failed():
                self._table.fail(job, now, settlement.error, settlement.keep)
            case _:
                job.attempts -= 1
                self._table.requeue(job, Step.RELEASE)
        return _APPLIED

    def _retry(self, job: Job, settlement: Retried, now: datetime) -> None:
        counted, job.uncounted = count_retry(settlement, job.uncounted)
        if counted and not settlement.counted and job.attempts >= job.new.max_attempts:
            self._table.fail(job, now, replace(settlement.error, exhausted=True), None)
            return
        if not counted:
            job.attempts -= 1
        self._table.retry_later(job, settlement.error, now + bounded(settlement.delay))

    async def recover(self, limit: int, *, max_stalls: int = 3) -> Recovery:
        now = self._now()
        processing = self._table.by_state[JobState.PROCESSING].values()
        stalled = list(
            itertools.islice((job for job in processing if job.deadline is not None and job.deadline <= now), limit)
        )
        requeued, failed = [], []
        for job in stalled:
            job.stalls += 1
            if job.stalls > max_stalls or job.attempts >= job.new.max_attempts:
                error = stalled_error(
                    worker=job.worker_id,
                    attempts=job.attempts,
                    max_attempts=job.new.max_attempts,
                    stalls=job.stalls,
                    max_stalls=max_stalls,
                )
                self._table.fail(job, now, error, None, Step.EXHAUST)
                failed.append(job.new.id)
            else:
                self._table.requeue(job, Step.STALL)
                requeued.append(job.new.id)
        return Recovery(requeued=tuple(requeued), failed=tuple(failed))

    async def sweep(self, limit: int) -> int:
        now = self._now()
        removed = sum(1 for _ in itertools.islice(self._table.drop_expired(now), limit))
        busy = {job.worker_id for job in self._table.by_state[JobState.PROCESSING].values()}
        gone = [name for name, seen in self._queue.seen.items() if seen + WORKER_RECORD <= now and name not in busy]
        for worker_id in gone[: limit - removed]:
            del self._queue.seen[worker_id]
            removed += 1
        return removed

    async def cancel(self, job_id: str) -> CancelResult:
        now = self._now()
        job = self._table.find(job_id, now)
        if job is None:
            return CancelResult.NOT_FOUND
        if job.waits:
            self._table.cancel(job, now)
            return CancelResult.CANCELLED
        if job.state is JobState.PROCESSING:
            job.cancel_requested = True
            self._queue.broadcast.publish(JobEventKind.CANCEL_REQUESTED, job_id)
        return CancelResult(job.state.value)

    async def status(self, ids: Sequence[str]) -> list[JobStatus | None]:
        now = self._now()
        return [_status(job) if (job := self._table.find(job_id, now)) else None for job_id in ids]

    async def result(self, job_id: str) -> JobOutcome | None:
        now = self._now()
        job = self._table.find(job_id, now)
        if job is None:
            return JobOutcome(kind=OutcomeKind.CANCELLED) if self._table.has_tombstone(job_id, now) else None
        if not job.finished:
            return None
        if job.state is JobState.COMPLETED:
            return JobOutcome(kind=OutcomeKind.COMPLETED, result=job.result)
        return JobOutcome(kind=OutcomeKind.FAILED, error=job.last_error)

    async def counts(self) -> dict[JobState, int]:
        self._look_at_the_clock()
        return {state: len(jobs) for state, jobs in self._table.by_state.items()}

    async def workers(self) -> list[WorkerInfo]:
        claims = dict.fromkeys(self._queue.seen, 0)
        for job in self._table.by_state[JobState.PROCESSING].values():
            if job.worker_id is not None:
                claims[job.worker_id] = claims.get(job.worker_id, 0) + 1
        return [WorkerInfo(id=name, seen_at=seen, claims=claims[name]) for name, seen in self._queue.seen.items()]

    async def pause(self) -> None:
        self._queue.paused = True

    async def resume(self) -> None:
        self._queue.paused = False
        self._queue.wake()

    async def retry(self, ids: Sequence[str]) -> int:
        now = self._now()
        failed = [job for job in self._found(ids, now) if job.state is JobState.FAILED]
        for job in failed:
            self._table.add_again(job, now)
        return len(failed)

    async def remove(self, ids: Sequence[str]) -> int:
        removed = [job for job in self._found(ids, self._now()) if job.state is not JobState.PROCESSING]
        for job in removed:
            if job.finished:
                self._table.expire(job)
            else:
                self._table.drop(job)
        return len(removed)

    async def promote(self, ids: Sequence[str]) -> int:
        now = self._now()
        delayed = [job for job in self._found(ids, now) if job.waits and job.state is not JobState.QUEUED]
        for job in delayed:
            self._table.promote(job, now)
        return len(delayed)

    async def drain(self) -> int:
        waiting = [job for jobs in self._table.by_state.values() for job in jobs.values() if job.waits]
        for job in waiting:
            self._table.drop(job)
        return len(waiting)

    async def clean(self, state: JobState, *, older_than: timedelta, limit: int = 1_000) -> int:
        check_cleanable(state)
        now = self._now()
        self._look_at_the_clock()
        ended_before = now - older_than
        records = self._table.by_state[state].values()
        old = (job for job in records if job.finished_at is not None and job.finished_at <= ended_before)
        cleaned = list(itertools.islice(old, limit))
        for job in cleaned:
            self._table.expire(job)
        return len(cleaned)

    async def update_result_ttl(self, job_id: str, ttl: timedelta) -> bool:
        check_retention(ttl)
        now = self._now()
        job = self._table.find(job_id, now)
        if job is None or not job.finished:
            return False
        self._table.keep(job, now + ttl)
        return True

    @asynccontextmanager
    async def events(self) -> AsyncIterator[BufferedSubscription]:
        with self._queue.broadcast.everything() as subscription:
            yield subscription

    @asynccontextmanager
    async def subscribe(self, job_id: str) -> AsyncIterator[BufferedSubscription]:
        with self._queue.broadcast.of_job(job_id) as subscription:
            yield subscription

    async def list(self, state: JobState, *, cursor: str | None = None, limit: int = 100) -> Page:
        self._look_at_the_clock()
        last = -1 if cursor is None else int(cursor)
        later = sorted((job for job in self._table.by_state[state].values() if job.serial > last), key=_serial)
        page = later[:limit]
        return Page(
            jobs=tuple(_status(job) for job in page), cursor=str(page[-1].serial) if len(later) > limit else None
        )

    def _now(self) -> datetime:
        return self._space.clock.now()

    def _look_at_the_clock(self) -> None:
        now = self._now()
        self._table.ready_what_is_due(now)
        deque(self._table.drop_expired(now), maxlen=0)

    def _found(self, ids: Sequence[str], now: datetime) -> tuple[Job, ...]:
        return tuple(job for job_id in dict.fromkeys(ids) if (job := self._table.find(job_id, now)))


def _serial(job: Job) -> int:
    return job.serial


def _why_lost(job: Job | None) -> LossReason:
    if job is None:
        return LossReason.NOT_FOUND
    return LossReason.COMPLETED if job.finished else LossReason.TAKEN


def _status(job: Job) -> JobStatus:
    delayed = job.state in (JobState.SCHEDULED, JobState.FAILING)
    return JobStatus(
        id=job.new.id,
        name=job.new.name,
        state=job.state,
        attempt=job.attempts,
        max_attempts=job.new.max_attempts,
        created_at=job.created_at,
        priority=job.new.priority,
        next_run_at=job.run_at if delayed else None,
        finished_at=job.finished_at,
        worker_id=job.worker_id,
        last_error=job.last_error,
    )
