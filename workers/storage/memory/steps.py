"""Every verb of a queue whose jobs are in memory, as one synchronous step at a given time.

`MemoryStorage` consists of these steps. `FileStorage` takes them on its copy of what the directory holds, and writes
down what they changed.
"""

from __future__ import annotations

import itertools
import uuid
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from workers.checks import LONGEST_LEASE
from workers.deduplication import Deduplication, DeduplicationMode
from workers.errors import LossReason
from workers.jobs import (
    SILENT_AFTER,
    Cancelled,
    CancelResult,
    Claim,
    Completed,
    Continued,
    CronLook,
    CronRow,
    EnqueueResult,
    EnqueueStatus,
    Failed,
    JobOutcome,
    JobRecord,
    JobState,
    JobStatus,
    Moved,
    NewJob,
    OutcomeKind,
    Page,
    ProgressReport,
    Recovery,
    Renewal,
    Retention,
    Retried,
    Settlement,
    SettleOutcome,
    SettleStatus,
    WorkerInfo,
    check_retention,
)
from workers.lifecycle import Step
from workers.limits import QUEUE_KEY, HeldBack, Limit, check_limits, limit_key_of
from workers.storage.base import ANY_NAME
from workers.storage.failures import lost_attempt, noted_failure, with_failure
from workers.storage.memory.dependents import DependentTable
from workers.storage.memory.jobs import record_of, status_of
from workers.storage.memory.line import KeyHolder
from workers.storage.memory.lines import WHEN_ONE_ENDS, StoredJob
from workers.storage.rules import (
    CRONS_AT_ONCE,
    STARTS_ANEW,
    WORKER_RECORD,
    bounded,
    bounded_count,
    check_claim,
    check_cleanable,
    count_retry,
    link_is_over,
    next_elsewhere,
    read_cursor,
    stalled_error,
)

_APPLIED: Final = SettleOutcome(status=SettleStatus.APPLIED)
_ALREADY_APPLIED: Final = SettleOutcome(status=SettleStatus.ALREADY_APPLIED)


class QueueSteps:
    """One queue's table of jobs, its workers, and whether it is paused; the verbs are those of `Storage`."""

    def __init__(self, table: DependentTable) -> None:
        self.table = table
        self.paused = False
        self.seen: dict[str, datetime] = {}
        self.cron_rows: dict[str, CronRow] = {}
        self._tokens = (f"{uuid.uuid4().hex}-{number}" for number in itertools.count())

    def see(self, worker_id: str, now: datetime | None) -> None:
        """Note that the worker was heard of at `now`; None forgets it."""
        if now is None:
            del self.seen[worker_id]
        else:
            self.seen[worker_id] = now

    # Limits

    def declare_limits(self, limits: Mapping[str, Limit]) -> None:
        check_limits(limits)
        self.table.declare_limits(limits)

    def declared_limits(self) -> dict[str, Limit]:
        return dict(self.table.limits.declared)

    def remove_limit(self, name: str) -> bool:
        return self.table.remove_limit(name)

    def held_back(self, ids: Sequence[str], now: datetime) -> list[HeldBack | None]:
        return [self._held_back(self.table.find(job_id, now), now) for job_id in ids]

    def _held_back(self, job: StoredJob | None, now: datetime) -> HeldBack | None:
        if job is None or job.state is not JobState.QUEUED:
            return None
        for key in (job.new.holding_key, QUEUE_KEY):
            own = limit_key_of(key)
            closed = None if key is None or own is None else self.table.limits.closed_until(key, now)
            if own is not None and closed is not None:
                return HeldBack(*own, None if closed is WHEN_ONE_ENDS else closed)
        return None

    def pause(self, paused: bool) -> None:
        """Keep jobs back from claims from now on, or stop doing so."""
        self.paused = paused
        if not paused:
            self.table.on_claimable()

    # What recurs

    def crons(self, due: bool, now: datetime) -> CronLook:
        rows = sorted(self.cron_rows.values(), key=lambda row: row.name)
        dates = {row.name: row.due for row in rows if row.due is not None}
        if due:
            names = sorted((at, name) for name, at in dates.items() if at <= now)[:CRONS_AT_ONCE]
            rows = [self.cron_rows[name] for _, name in names]
        return CronLook(now=now, rows=rows, next_due=min(dates.values(), default=None))

    def replace_cron(self, row: CronRow, jobs: Sequence[NewJob], now: datetime) -> bool:
        known = self.cron_rows.get(row.name)
        if row.revision != (1 if known is None else known.revision + 1):
            return False
        self.enqueue(jobs, now)
        self.keep_cron(row)
        return True

    def keep_cron(self, row: CronRow) -> None:
        """Keep the row, in the place of an older one."""
        self.cron_rows[row.name] = row

    # Jobs

    def enqueue(self, jobs: Sequence[NewJob], now: datetime) -> list[EnqueueResult]:
        groups: dict[str, KeyHolder | None] = {}
        if any(job.after for job in jobs):
            self.table.refuse_unknown(jobs, now)
        return [self._enqueue(job, groups, now) for job in jobs]

    def _enqueue(self, new: NewJob, groups: dict[str, KeyHolder | None], now: datetime) -> EnqueueResult:
        """Enqueue one job. `groups` has the keys met in this call, and who had each before."""
        job = self.table.find(new.id, now)
        if job is not None and job.state is JobState.COMPLETED:
            return EnqueueResult(id=new.id, status=EnqueueStatus.COMPLETED, existing_state=job.state, result=job.result)
        if job is not None and job.state not in STARTS_ANEW:
            return EnqueueResult(id=new.id, status=EnqueueStatus.DUPLICATE, existing_state=job.state)
        if new.deduplication is not None:
            key = new.deduplication.key
            if key not in groups:
                groups[key] = self.table.holder_of(key, now)
                if groups[key] is None:
                    self.table.give(key, _holder(new, new.deduplication, now))
            if (holder := groups[key]) is not None:
                return self._deduplicated(new, holder, new.deduplication.mode, now)
        if new.after:
            self.table.add_after(new, now)
        else:
            self.table.add(new, now)
        return EnqueueResult(id=new.id, status=EnqueueStatus.QUEUED)

    def _deduplicated(self, new: NewJob, holder: KeyHolder, mode: DeduplicationMode, now: datetime) -> EnqueueResult:
        job = self.table.find(holder.job_id, now)
        if job is not None and holder.mode is mode is DeduplicationMode.DEBOUNCE:
            self.table.debounce(job, new, now)
        state = None if job is None else job.state
        return EnqueueResult(id=holder.job_id, status=EnqueueStatus.DUPLICATE, existing_state=state)

    def claim(self, worker_id: str, leases: Mapping[str, timedelta], limit: int, now: datetime) -> list[Claim]:
        check_claim(worker_id, leases)
        self.table.ready_what_is_due(now)
        self.see(worker_id, now)
        if self.paused:
            return []
        return [self._grant(job, worker_id, leases, now) for job in self.table.take(leases, limit, now)]

    def _grant(self, job: StoredJob, worker_id: str, leases: Mapping[str, timedelta], now: datetime) -> Claim:
        new = job.new
        lease = leases[new.name] if new.name in leases else leases[ANY_NAME]
        token = next(self._tokens)
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
            chain_index=new.chain_index,
            last_error=job.last_error,
            meta=new.meta,
        )

    def claimable_in(self, names: Collection[str], now: datetime) -> timedelta | None:
        """Return how long until a claim for these names may succeed, 0 for now; None while nothing else happens."""
        self.table.ready_what_is_due(now)
        if self.paused:
            return None
        due = self.table.next_due()
        if self.table.claimable(names):
            closed = self.table.limits.queue_closed_until(now)
            if closed is None:
                return timedelta(0)
            if closed is not WHEN_ONE_ENDS:
                due = closed if due is None else min(due, closed)
        return None if due is None else due - now

    def renew(self, claims: Sequence[Claim], now: datetime) -> Renewal:
        lost: dict[str, LossReason] = {}
        cancel_requested: list[str] = []
        for claim in claims:
            self.see(claim.worker_id, now)
            job = self.table.find(claim.job_id, now)
            if job is None or job.token != claim.token:
                lost[claim.token] = _why_lost(job)
                continue
            self.table.extend(job, now + claim.lease)
            if job.cancel_requested:
                cancel_requested.append(claim.token)
        return Renewal(lost=lost, cancel_requested=frozenset(cancel_requested))

    def settle(self, settlements: Sequence[Settlement], now: datetime) -> list[SettleOutcome]:
        return [self._settle(settlement, now) for settlement in settlements]

    def _settle(self, settlement: Settlement, now: datetime) -> SettleOutcome:
        claim = settlement.claim
        job = self.table.find(claim.job_id, now)
        if job is not None and job.settled_by == claim.token:
            return _ALREADY_APPLIED
        if job is None or job.token != claim.token:
            return SettleOutcome(status=SettleStatus.LOST, reason=_why_lost(job))
        if fault := next_elsewhere(settlement):
            return fault
        match settlement:
            case Completed():
                self.table.complete(job, now, settlement.result, settlement.keep)
                if settlement.then is not None:
                    self._enqueue(settlement.then, {}, now)
            case Continued():
                self.table.continue_with(job, settlement.then, now)
            case Retried():
                self._retry(job, settlement, now)
            case Failed():
                job.failures = with_failure(job.failures, noted_failure(settlement), now)
                self.table.fail(job, now, settlement.error, settlement.keep)
            case Cancelled():
                self.table.stop(job, now, settlement.keep)
            case _:
                job.attempts -= 1
                self.table.requeue(job, Step.RELEASE)
        return _APPLIED

    def _retry(self, job: StoredJob, settlement: Retried, now: datetime) -> None:
        counted, job.uncounted = count_retry(settlement, job.uncounted)
        if counted:
            job.failures = with_failure(job.failures, noted_failure(settlement), now)
        if counted and not settlement.counted and job.attempts >= job.new.max_attempts:
            self.table.fail(job, now, replace(settlement.error, exhausted=True), None)
            return
        if not counted:
            job.attempts -= 1
        due = now + bounded(settlement.delay)
        if settlement.snoozed:
            self.table.snooze(job, due)
        else:
            self.table.retry_later(job, settlement.error, due)

    def progress(self, reports: Sequence[ProgressReport], now: datetime) -> None:
        for report in reports:
            job = self.table.find(report.claim.job_id, now)
            if job is not None and job.token == report.claim.token:
                self.table.report(job, report.value)

    def recover(self, limit: int, max_stalls: int, now: datetime) -> Recovery:
        processing = self.table.by_state[JobState.PROCESSING].values()
        for job in processing:
            if job.deadline is not None and job.deadline > now + LONGEST_LEASE:
                self.table.extend(job, now + SILENT_AFTER)
        over = (job for job in processing if job.deadline is not None and job.deadline <= now)
        stalled = list(itertools.islice(over, bounded_count(limit)))
        requeued, failed = [], []
        for job in stalled:
            job.stalls += 1
            job.failures = with_failure(job.failures, lost_attempt(job.attempts, job.worker_id), now)
            if job.stalls > max_stalls or job.attempts >= job.new.max_attempts:
                error = stalled_error(
                    worker=job.worker_id,
                    attempts=job.attempts,
                    max_attempts=job.new.max_attempts,
                    stalls=job.stalls,
                    max_stalls=max_stalls,
                )
                self.table.fail(job, now, error, None, Step.EXHAUST)
                failed.append(job.new.id)
            else:
                self.table.requeue(job, Step.STALL)
                requeued.append(job.new.id)
        return Recovery(requeued=tuple(requeued), failed=tuple(failed))

    def sweep(self, limit: int, now: datetime) -> int:
        limit = bounded_count(limit)
        removed = sum(1 for _ in itertools.islice(self.table.drop_expired(now), limit))
        busy = {job.worker_id for job in self.table.by_state[JobState.PROCESSING].values()}
        gone = [name for name, seen in self.seen.items() if seen + WORKER_RECORD <= now and name not in busy]
        for worker_id in gone[: limit - removed]:
            self.see(worker_id, None)
            removed += 1
        return removed

    def cancel(self, job_id: str, now: datetime) -> CancelResult:
        job = self.table.find(job_id, now)
        if job is None:
            return CancelResult.NOT_FOUND
        if job.waits:
            self.table.cancel(job, now)
            return CancelResult.CANCELLED
        if job.state is JobState.PROCESSING:
            self.table.request_cancel(job)
        return CancelResult(job.state.value)

    def farewell(self, worker_id: str) -> None:
        if worker_id in self.seen:
            self.see(worker_id, None)

    # Reading

    def status(self, ids: Sequence[str], now: datetime) -> list[JobStatus | None]:
        return [self._status(job) if (job := self.table.find(job_id, now)) else None for job_id in ids]

    def _status(self, job: StoredJob) -> JobStatus:
        return status_of(job, self.table.waits_for(job.new.id))

    def read(self, ids: Sequence[str], now: datetime) -> list[JobRecord | None]:
        return [record_of(job, self._status(job)) if (job := self.table.find(job_id, now)) else None for job_id in ids]

    def result(self, job_id: str, now: datetime) -> JobOutcome | None:
        job = self.table.find(job_id, now)
        if job is None:
            return None
        match job.state:
            case JobState.COMPLETED:
                return JobOutcome(kind=OutcomeKind.COMPLETED, result=job.result)
            case JobState.FAILED:
                return JobOutcome(kind=OutcomeKind.FAILED, error=job.last_error)
            case JobState.CANCELLED:
                return JobOutcome(kind=OutcomeKind.CANCELLED)
            case _:
                return None

    def outcomes(self, job_id: str, now: datetime) -> dict[str, JobOutcome | None]:
        job = self.table.find(job_id, now)
        return dict(job.outcomes or {}) if job is not None else {}

    def counts(self, now: datetime) -> dict[JobState, int]:
        self._look_at_the_clock(now)
        return {state: len(jobs) for state, jobs in self.table.by_state.items()}

    def waiting_since(self, now: datetime) -> datetime | None:
        self.table.ready_what_is_due(now)
        return min((job.run_at for job in self.table.by_state[JobState.QUEUED].values()), default=None)

    def workers(self) -> list[WorkerInfo]:
        claims = dict.fromkeys(self.seen, 0)
        for job in self.table.by_state[JobState.PROCESSING].values():
            if job.worker_id is not None:
                claims[job.worker_id] = claims.get(job.worker_id, 0) + 1
        return [WorkerInfo(id=name, seen_at=seen, claims=claims[name]) for name, seen in self.seen.items()]

    def page(self, state: JobState, name: str | None, cursor: str | None, limit: int, now: datetime) -> Page:
        self._look_at_the_clock(now)
        last, limit = read_cursor(cursor), bounded_count(limit)
        named = (job for job in self.table.by_state[state].values() if name in (None, job.new.name))
        later = sorted((job for job in named if job.serial > last), key=_serial)
        page = later[:limit]
        return Page(
            jobs=tuple(self._status(job) for job in page),
            cursor=str(page[-1].serial) if page and len(later) > limit else None,
        )

    # Management

    def retry(self, ids: Sequence[str], now: datetime) -> Moved:
        ended = [job for job in self._found(ids, now) if job.state in STARTS_ANEW]
        for job in ended:
            self.table.add_again(job, now)
        return Moved(job.new.id for job in ended)

    def complete(self, job_id: str, result: bytes, keep: Retention | None, now: datetime) -> JobState | None:
        job = self.table.find(job_id, now)
        if job is None:
            return None
        state = job.state
        if not job.finished:
            self.table.complete_from_outside(job, now, result, keep)
        return state

    def continue_job(self, then: NewJob, now: datetime) -> JobState | None:
        job = self.table.find(then.id, now)
        if job is None:
            return None
        state = job.state
        if not job.finished:
            if then.chain_index != job.new.chain_index + 1:
                raise link_is_over(then.id)
            self.table.continue_from_outside(job, then, now)
        return state

    def remove(self, ids: Sequence[str], running: bool, now: datetime) -> int:
        removed = [job for job in self._found(ids, now) if running or job.state is not JobState.PROCESSING]
        self._remove(removed, now)
        return len(removed)

    def _remove(self, jobs: Iterable[StoredJob], now: datetime) -> None:
        for job in jobs:
            # One that followed another of them may have failed with it, and its record may be gone already.
            if self.table.find(job.new.id, now) is not job:
                continue
            if job.finished:
                self.table.expire(job)
            else:
                self.table.drop(job, now)

    def promote(self, ids: Sequence[str], now: datetime) -> int:
        delayed = [job for job in self._found(ids, now) if job.waits and job.state is not JobState.QUEUED]
        for job in delayed:
            self.table.promote(job, now)
        return len(delayed)

    def drain(self, now: datetime) -> int:
        waiting = [job for jobs in self.table.by_state.values() for job in jobs.values() if job.waits]
        # Those that follow others go first, because those others do not release them then.
        self._remove(sorted(waiting, key=lambda job: job.state is not JobState.WAITING), now)
        return len(waiting)

    def clean(self, state: JobState, older_than: timedelta, limit: int, now: datetime) -> int:
        check_cleanable(state)
        self._look_at_the_clock(now)
        ended_before = now - bounded(older_than)
        records = self.table.by_state[state].values()
        old = (job for job in records if job.finished_at is not None and job.finished_at <= ended_before)
        cleaned = list(itertools.islice(old, bounded_count(limit)))
        for job in cleaned:
            self.table.expire(job)
        return len(cleaned)

    def update_result_ttl(self, job_id: str, ttl: timedelta, now: datetime) -> bool:
        check_retention(ttl)
        job = self.table.find(job_id, now)
        if job is None or not job.finished:
            return False
        self.table.keep(job, now + ttl)
        return True

    def _look_at_the_clock(self, now: datetime) -> None:
        self.table.ready_what_is_due(now)
        deque(self.table.drop_expired(now), maxlen=0)

    def _found(self, ids: Sequence[str], now: datetime) -> tuple[StoredJob, ...]:
        return tuple(job for job_id in dict.fromkeys(ids) if (job := self.table.find(job_id, now)))


def _holder(new: NewJob, deduplication: Deduplication, now: datetime) -> KeyHolder:
    ttl = deduplication.ttl if deduplication.mode is DeduplicationMode.THROTTLE else None
    return KeyHolder(job_id=new.id, mode=deduplication.mode, until=None if ttl is None else now + new.delay + ttl)


def _serial(job: StoredJob) -> int:
    return job.serial


def _why_lost(job: StoredJob | None) -> LossReason:
    if job is None:
        return LossReason.NOT_FOUND
    return LossReason.COMPLETED if job.finished else LossReason.TAKEN
