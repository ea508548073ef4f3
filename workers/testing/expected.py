"""The expected content of a queue after each call: the transition table with time, attempts, tokens and order.

It is pure, and written from the contract, not from any storage. Where the contract leaves a choice (which of several
expired leases are recovered first, how jobs due at the same moment are ordered), it takes the storage's answer and
checks that it is one of those allowed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from workers.deduplication import Deduplication, DeduplicationMode
from workers.errors import LossReason
from workers.jobs import (
    DROP,
    Cancelled,
    CancelResult,
    Claim,
    Completed,
    Continued,
    EnqueueResult,
    EnqueueStatus,
    ErrorInfo,
    Failed,
    JobOutcome,
    JobState,
    NewJob,
    OutcomeKind,
    ProgressReport,
    Recovery,
    Renewal,
    Retention,
    Retried,
    Settlement,
    SettleOutcome,
    SettleStatus,
)
from workers.lifecycle import Step, after
from workers.storage.base import ANY_NAME
from workers.storage.rules import count_retry


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedKeyHolder:
    """The job that has a deduplication key; `until` by `throttle`, otherwise for as long as its mode says."""

    job_id: str
    mode: DeduplicationMode
    until: datetime | None


class ExpectedKeys:
    """All deduplication keys, and the jobs that have them."""

    def __init__(self) -> None:
        self._holders: dict[str, ExpectedKeyHolder] = {}

    def take(self, new: NewJob, asked: Deduplication, now: datetime) -> ExpectedKeyHolder | None:
        """Give the key to the new job, or return the holder that has it."""
        holder = self._holders.get(asked.key)
        if holder is not None and (holder.until is None or holder.until > now):
            return holder
        ttl = asked.ttl if asked.mode is DeduplicationMode.THROTTLE else None
        until = None if ttl is None else now + new.delay + ttl
        self._holders[asked.key] = ExpectedKeyHolder(job_id=new.id, mode=asked.mode, until=until)
        return None

    def let_go(self, job_id: str, *, claimed: bool, over: bool) -> None:
        """Free the keys of a job that is over; a key by `debounce` is free when the job is claimed, too."""
        for key, holder in list(self._holders.items()):
            ends = over or (claimed and holder.mode is DeduplicationMode.DEBOUNCE)
            if holder.job_id == job_id and holder.until is None and ends:
                del self._holders[key]


WAITING = (JobState.QUEUED, JobState.SCHEDULED, JobState.WAITING, JobState.FAILING)
FINISHED = tuple(state for state in JobState if state.is_final)
BEGINS_ANEW = (JobState.FAILED, JobState.CANCELLED)


@dataclass(slots=True, kw_only=True)
class ExpectedJob:
    """One generation of a job. `serial` counts enqueues; `moved` says that it left the place its enqueue gave it."""

    new: NewJob
    state: JobState
    created_at: datetime
    run_at: datetime
    serial: int
    moved: bool = False
    attempts: int = 0
    stalls: int = 0
    uncounted: int = 0
    token: str | None = None
    settled_by: str | None = None
    worker_id: str | None = None
    deadline: datetime | None = None
    cancel_requested: bool = False
    expires_at: datetime | None = None
    finished_at: datetime | None = None
    error: ErrorInfo | None = None
    failures: tuple[int, ...] = ()
    result: bytes = b""
    progress: bytes | None = None

    def must_precede(self, other: ExpectedJob) -> bool:
        """Tell whether claiming `other` before this job breaks the order: priority, then first come, first served."""
        if self.new.priority != other.new.priority:
            return self.new.priority < other.new.priority
        if self.run_at != other.run_at:
            return self.run_at < other.run_at
        return not self.moved and not other.moved and self.serial < other.serial


class ExpectedQueue:
    """The jobs that there should be at `now`, which the owner moves; `fresh_retries` is the storage's limit."""

    def __init__(self, now: datetime, *, fresh_retries: bool = True) -> None:
        self.now = now
        self._fresh_retries = fresh_retries
        self.paused = False
        self.jobs: dict[str, ExpectedJob] = {}
        self._holders = ExpectedKeys()
        self._tokens: set[str] = set()
        self._applied: set[str] = set()
        self._serial = 0

    def pass_time(self, by: timedelta) -> None:
        """Move the time; what is due is queued, what is over is gone."""
        self.now += by
        for job in list(self.jobs.values()):
            self._look(job)

    def _look(self, job: ExpectedJob) -> None:
        if job.state in (JobState.SCHEDULED, JobState.FAILING) and job.run_at <= self.now:
            self._step(job, Step.COME_DUE)
        elif job.expires_at is not None and job.expires_at <= self.now:
            self._step(job, Step.EXPIRE)

    def _step(self, job: ExpectedJob, step: Step) -> None:
        target = after(job.state, step)
        self._holders.let_go(job.new.id, claimed=step is Step.CLAIM, over=target is None or target in FINISHED)
        if target is None:
            del self.jobs[job.new.id]
        else:
            job.state = target

    # What should be read

    def outcome(self, job_id: str) -> JobOutcome | None:
        """Return what `result` should answer."""
        job = self.jobs.get(job_id)
        if job is None or job.state not in FINISHED:
            return None
        completed, failed = job.state is JobState.COMPLETED, job.state is JobState.FAILED
        kind = OutcomeKind(job.state.value)
        return JobOutcome(kind=kind, result=job.result if completed else None, error=job.error if failed else None)

    def counts(self) -> dict[JobState, int]:
        """Return what `counts` should answer."""
        return {state: sum(job.state is state for job in self.jobs.values()) for state in JobState}

    # Enqueue

    def enqueue(self, jobs: Sequence[NewJob]) -> list[EnqueueResult]:
        """Enqueue the jobs, and return what `enqueue` should answer."""
        groups: dict[str, ExpectedKeyHolder | None] = {}
        return [self._enqueue(new, groups) for new in jobs]

    def _enqueue(self, new: NewJob, groups: dict[str, ExpectedKeyHolder | None]) -> EnqueueResult:
        """Enqueue one job; `groups` says who had each key of this call before it."""
        old = self.jobs.get(new.id)
        if old is not None and old.state is JobState.COMPLETED:
            return EnqueueResult(id=new.id, status=EnqueueStatus.COMPLETED, existing_state=old.state, result=old.result)
        if old is not None and old.state not in BEGINS_ANEW:
            return EnqueueResult(id=new.id, status=EnqueueStatus.DUPLICATE, existing_state=old.state)
        asked = new.deduplication
        if asked is not None:
            has_it = groups[asked.key] if asked.key in groups else self._holders.take(new, asked, self.now)
            groups[asked.key] = has_it
            if has_it is not None:
                return self._deduplicated(new, asked.mode, has_it)
        self._begin(new, old, self.now)
        return EnqueueResult(id=new.id, status=EnqueueStatus.QUEUED)

    def _deduplicated(self, new: NewJob, mode: DeduplicationMode, holder: ExpectedKeyHolder) -> EnqueueResult:
        job = self.jobs.get(holder.job_id)
        if job is not None and holder.mode is mode is DeduplicationMode.DEBOUNCE:
            self._debounce(job, new)
        state = None if job is None else job.state
        return EnqueueResult(id=holder.job_id, status=EnqueueStatus.DUPLICATE, existing_state=state)

    def _debounce(self, job: ExpectedJob, new: NewJob) -> None:
        self._step(job, Step.DEBOUNCE)
        job.new = replace(job.new, payload=new.payload)
        job.run_at, job.moved = self.now + new.delay, True

    def _begin(
        self, new: NewJob, old: ExpectedJob | None, created_at: datetime, step: Step | None = None
    ) -> ExpectedJob:
        state = after(old.state if old else None, step or (Step.SCHEDULE if new.delay else Step.ENQUEUE))
        assert state is not None
        self._serial += 1
        new = replace(new, deduplication=None)  # a retried job has no key
        job = ExpectedJob(new=new, state=state, created_at=created_at, run_at=self.now + new.delay, serial=self._serial)
        self.jobs[new.id] = job
        return job

    # Claim

    def claimed(self, claims: Sequence[Claim], worker_id: str, leases: Mapping[str, timedelta], limit: int) -> None:
        """Start the jobs claimed; they must be those that come first, and as many as possible."""
        for claim in claims:
            open_to = self._claimable(leases)
            job = self.jobs[claim.job_id]
            assert job in open_to, f"{claim.job_id!r} is {job.state}, and was handed out"
            earlier = [other.new.id for other in open_to if self._precedes(other, job)]
            assert not earlier, f"{claim.job_id!r} was handed out before {earlier}"
            self._start(job, claim, worker_id, leases)
        left = [] if len(claims) == limit else self._left_behind(leases)
        assert not left, f"{[job.new.id for job in left]} could have been handed out"
        assert len(claims) <= limit, f"{len(claims)} jobs were handed out, more than the limit of {limit}"

    def _claimable(self, names: Collection[str]) -> list[ExpectedJob]:
        if self.paused:
            return []
        busy = {job.new.ordering_key for job in self.jobs.values() if job.state is JobState.PROCESSING} - {None}
        return [
            job
            for job in self.jobs.values()
            if job.state is JobState.QUEUED
            and (ANY_NAME in names or job.new.name in names)
            and job.new.ordering_key not in busy
        ]

    def _left_behind(self, names: Collection[str]) -> list[ExpectedJob]:
        """Return the jobs that the claim had to bring as well, if it could bring more."""
        return self._claimable(names)

    def _precedes(self, one: ExpectedJob, other: ExpectedJob) -> bool:
        """Tell whether claiming `other` before the first job breaks the order."""
        return one.must_precede(other)

    def _start(self, job: ExpectedJob, claim: Claim, worker_id: str, leases: Mapping[str, timedelta]) -> None:
        self._step(job, Step.CLAIM)
        assert claim.token not in self._tokens, "a token was used twice"
        self._tokens.add(claim.token)
        lease = leases.get(job.new.name, leases.get(ANY_NAME))
        assert lease is not None
        job.attempts += 1
        job.token, job.settled_by, job.worker_id, job.deadline = claim.token, None, worker_id, self.now + lease
        new = job.new
        expected = (new.name, new.payload, new.meta, job.attempts, new.max_attempts, worker_id, lease)
        told = (claim.name, claim.payload, claim.meta, claim.attempt, claim.max_attempts, claim.worker_id, claim.lease)
        assert told == expected

    # While a job is held

    def renew(self, claims: Sequence[Claim]) -> Renewal:
        """Extend the leases that still hold their job, and return what `renew` should answer."""
        lost: dict[str, LossReason] = {}
        requested: set[str] = set()
        for claim in claims:
            job = self.jobs.get(claim.job_id)
            if job is None or job.token != claim.token:
                lost[claim.token] = _why_lost(job)
                continue
            job.deadline = self.now + claim.lease
            if job.cancel_requested:
                requested.add(claim.token)
        return Renewal(lost=lost, cancel_requested=frozenset(requested))

    def progress(self, reports: Sequence[ProgressReport]) -> None:
        """Store the progress of claims that hold their job."""
        for report in reports:
            if self.holds(report.claim):
                self.jobs[report.claim.job_id].progress = report.value

    # Settle

    def settled(self, settlement: Settlement, told: SettleOutcome) -> None:
        """End the attempt if its token holds the job; the storage's answer must say whether it did, or why not."""
        claim = settlement.claim
        job = self.jobs.get(claim.job_id)
        if job is None and claim.token in self._applied and told.status is SettleStatus.ALREADY_APPLIED:
            return  # correct for a record that has expired but is not swept yet
        if job is not None and job.settled_by == claim.token:
            assert told == SettleOutcome(status=SettleStatus.ALREADY_APPLIED)
        elif job is None or job.token != claim.token:
            assert told == SettleOutcome(status=SettleStatus.LOST, reason=_why_lost(job))
        else:
            assert told == SettleOutcome(status=SettleStatus.APPLIED)
            self._applied.add(claim.token)
            self._settle(job, settlement)

    def holds(self, claim: Claim) -> bool:
        """Tell whether the claim may still settle its job."""
        job = self.jobs.get(claim.job_id)
        return job is not None and job.token == claim.token

    def _settle(self, job: ExpectedJob, settlement: Settlement) -> None:
        match settlement:
            case Completed():
                job.result = settlement.result
                self._end(job, Step.COMPLETE, settlement.keep or job.new.keep_completed)
                if settlement.then is not None:
                    self.enqueue([settlement.then])
            case Failed():
                job.error = settlement.error
                job.failures = (*job.failures, job.attempts)
                self._end(job, Step.FAIL, settlement.keep or job.new.keep_failed)
            case Cancelled():
                self._end(job, Step.STOP, settlement.keep or job.new.keep_failed)
            case Continued():
                self._go_on(job, settlement.then, Step.CONTINUE_LATER if settlement.then.delay else Step.CONTINUE)
            case Retried():
                self._retry(job, settlement)
            case _:
                job.attempts -= 1
                self._end(job, Step.RELEASE)

    def _go_on(self, job: ExpectedJob, then: NewJob, step: Step) -> None:
        self._serial += 1
        job.new, job.run_at, job.serial, job.moved = then, self.now + then.delay, self._serial, False
        job.attempts = job.stalls = job.uncounted = 0
        job.error, job.failures = None, ()
        self._end(job, step)

    def _retry(self, job: ExpectedJob, settlement: Retried) -> None:
        counted, job.uncounted = count_retry(settlement, job.uncounted)
        if not settlement.snoozed:
            job.error = settlement.error
        if counted:
            job.failures = (*job.failures, job.attempts)
        if counted and not settlement.counted and job.attempts >= job.new.max_attempts:
            job.error = replace(settlement.error, exhausted=True)
            self._end(job, Step.FAIL, job.new.keep_failed)
            return
        job.attempts -= not counted
        job.run_at, job.moved = self.now + settlement.delay, True
        has_failed = job.error is not None or (not self._fresh_retries and job.attempts > job.stalls)
        snoozed = Step.SNOOZE_AGAIN if has_failed else Step.SNOOZE
        self._end(job, snoozed if settlement.snoozed else Step.RETRY)

    def _end(self, job: ExpectedJob, step: Step, keep: Retention | None = None) -> None:
        self._step(job, step)
        by_reaper = step in (Step.STALL, Step.EXHAUST)
        job.settled_by = None if by_reaper else job.token
        job.cancel_requested = job.cancel_requested and by_reaper
        job.token = job.worker_id = job.deadline = None
        if job.state in FINISHED:
            job.finished_at = self.now
            job.expires_at = self.now if keep is DROP or keep is None else self.now + keep
        self._look(job)

    # Recover

    def recovered(self, recovery: Recovery, limit: int, max_stalls: int) -> None:
        """Queue or fail the jobs recovered, which must be expired ones, and as many as the limit allows."""
        expired = {job.new.id for job in self.jobs.values() if job.deadline is not None and job.deadline <= self.now}
        told = (*recovery.requeued, *recovery.failed)
        assert len(set(told)) == len(told) == min(limit, len(expired)), f"{told} of {expired} were recovered"
        assert set(told) <= expired
        for job_id in told:
            job = self.jobs[job_id]
            job.stalls += 1
            job.failures = (*job.failures, job.attempts)
            gives_up = job.stalls > max_stalls or job.attempts >= job.new.max_attempts
            assert (job_id in recovery.failed) == gives_up, f"{job_id!r}: stalled {job.stalls} times"
            if gives_up:
                job.error = ErrorInfo(type="StalledError", message="", exhausted=job.attempts >= job.new.max_attempts)
                self._end(job, Step.EXHAUST, job.new.keep_failed)
            else:
                self._end(job, Step.STALL)

    # Manage

    def cancel(self, job_id: str) -> CancelResult:
        """Cancel a waiting job, and return what `cancel` should answer."""
        job = self.jobs.get(job_id)
        if job is None:
            return CancelResult.NOT_FOUND
        if job.state in WAITING:
            job.token = None
            self._end(job, Step.CANCEL, job.new.keep_failed)
            return CancelResult.CANCELLED
        job.cancel_requested = job.cancel_requested or job.state is JobState.PROCESSING
        return CancelResult(job.state.value)

    def retry(self, ids: Iterable[str]) -> int:
        """Begin a new life for the failed and cancelled jobs, and return how many there were."""
        ended = self._those(ids, BEGINS_ANEW)
        for job in ended:
            again = self._begin(replace(job.new, delay=timedelta(0), after=()), job, job.created_at)
            again.moved = True
            again.attempts = 0 if self._fresh_retries else job.attempts - job.stalls
        return len(ended)

    def remove(self, ids: Iterable[str], *, running: bool = False) -> int:
        """Remove these jobs, processing ones only with `running`, and return how many there were."""
        removed = self._those(ids, tuple(JobState) if running else (*WAITING, *FINISHED))
        for job in removed:
            if job.new.id in self.jobs:  # one that followed another of them may be gone with it
                self._step(job, _removal(job.state))
        return len(removed)

    def complete(self, job_id: str, result: bytes, keep: Retention | None) -> JobState | None:
        """Complete an unfinished job from outside of any attempt, and return what `complete` should answer."""
        job = self.jobs.get(job_id)
        if job is None:
            return None
        found = job.state
        if found not in FINISHED:
            job.token, job.result = None, result
            self._end(job, Step.COMPLETE_FROM_OUTSIDE, keep or job.new.keep_completed)
        return found

    def continue_job(self, then: NewJob) -> JobState | None:
        """Let an unfinished job go on from outside of any attempt, and return what `continue_job` should answer."""
        job = self.jobs.get(then.id)
        if job is None:
            return None
        found = job.state
        if found not in FINISHED:
            job.token = None
            self._go_on(job, then, Step.CONTINUE_FROM_OUTSIDE_LATER if then.delay else Step.CONTINUE_FROM_OUTSIDE)
        return found

    def promote(self, ids: Iterable[str]) -> int:
        """Make delayed jobs due now, and return how many there were."""
        delayed = self._those(ids, (JobState.SCHEDULED, JobState.FAILING))
        for job in delayed:
            job.run_at, job.moved = self.now, True
            self._step(job, Step.COME_DUE)
        return len(delayed)

    def update_result_ttl(self, job_id: str, ttl: timedelta) -> bool:
        """Let a finished job's record last from now; return whether it was finished."""
        finished = self._those([job_id], FINISHED)
        for job in finished:
            job.expires_at = self.now + ttl
        return bool(finished)

    def clean(self, state: JobState, older_than: timedelta) -> int:
        """Remove the records that ended long enough ago, and return how many there were."""
        ended = self._those(list(self.jobs), (state,))
        old = [job for job in ended if job.finished_at is not None and job.finished_at <= self.now - older_than]
        return self.remove([job.new.id for job in old])

    def _those(self, ids: Iterable[str], states: Collection[JobState]) -> list[ExpectedJob]:
        found = (self.jobs.get(job_id) for job_id in dict.fromkeys(ids))
        return [job for job in found if job is not None and job.state in states]


def _removal(state: JobState) -> Step:
    return Step.EXPIRE if state in FINISHED else Step.REMOVE


def _why_lost(job: ExpectedJob | None) -> LossReason:
    if job is None:
        return LossReason.NOT_FOUND
    return LossReason.COMPLETED if job.state in FINISHED else LossReason.TAKEN
