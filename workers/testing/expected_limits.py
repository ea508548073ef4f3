"""The expected content of a queue in which limits keep jobs back, and fair keys share.

What may be claimed is said at best, and what has to be at worst: see `ExpectedLimits`. A storage parks the jobs that it
keeps back, and one claim need not see those that come up in it. So of jobs with a limit key or a fair key a claim may
bring fewer than there are, and their order is only asked for where nothing of their key came up in the same claim.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TypeAlias

from workers.jobs import AfterFailure, Claim, JobState, NewJob
from workers.lifecycle import Step, after
from workers.limits import WHOLE_QUEUE, HeldBack, Limit, LimitKey
from workers.storage.rules import dependency_error
from workers.testing.expected import BEGINS_ANEW, ExpectedJob, ExpectedQueue


class ExpectedLimits:
    """The limits by name, and when the bucket of each key is full again: at the earliest, and at the latest.

    The two differ when a limit has changed so that the bucket would take longer to fill than an empty one. Then it
    counts as empty from when the storage next looks at it, which may be soon or late.
    """

    def __init__(self) -> None:
        self.declared: dict[str, Limit] = {}
        self._full: dict[LimitKey, tuple[datetime, datetime]] = {}

    def declare(self, limits: Mapping[str, Limit], now: datetime) -> None:
        """Keep each limit, unless the one kept has a higher version."""
        for name, limit in limits.items():
            if name not in self.declared or limit.version >= self.declared[name].version:
                self.declared[name] = limit
        for key, (earliest, latest) in self._full.items():
            self._full[key] = (self._at_most_empty(key, earliest, now), latest)

    def remove(self, name: str) -> bool:
        """Forget the limit, and return what `remove_limit` should answer."""
        return self.declared.pop(name, None) is not None

    def start(self, key: LimitKey, now: datetime) -> None:
        """Take a token, if the limit has any."""
        limit = self.declared.get(key.limit)
        if limit is not None and limit.interval is not None:
            earliest, latest = self._full_at(key, now)
            self._full[key] = (max(earliest, now) + limit.interval, max(latest, now) + limit.interval)

    def holds_back(self, key: LimitKey, running: int, now: datetime) -> tuple[HeldBack | None, HeldBack | None]:
        """Return what keeps a job of this key back, at best and at worst, when so many are running."""
        limit = self.declared.get(key.limit)
        if limit is not None and limit.concurrency is not None and running >= limit.concurrency:
            return (HeldBack(*key, None),) * 2
        if limit is None or limit.interval is None:
            return None, None
        best, worst = (full_at - (limit.capacity - 1) * limit.interval for full_at in self._full_at(key, now))
        return _until(key, best, now), _until(key, worst, now)

    def _full_at(self, key: LimitKey, now: datetime) -> tuple[datetime, datetime]:
        earliest, latest = self._full.get(key, (now, now))
        return self._at_most_empty(key, earliest, now), self._at_most_empty(key, latest, now)

    def _at_most_empty(self, key: LimitKey, full_at: datetime, now: datetime) -> datetime:
        limit = self.declared.get(key.limit)
        if limit is None or limit.interval is None:
            return full_at
        return min(full_at, now + limit.capacity * limit.interval)


def _until(key: LimitKey, opens: datetime, now: datetime) -> HeldBack | None:
    return HeldBack(*key, opens) if opens > now else None


class ExpectedGraph(ExpectedQueue):
    """A queue, and who follows whom in it."""

    def __init__(self, now: datetime, *, fresh_retries: bool = True) -> None:
        super().__init__(now, fresh_retries=fresh_retries)
        self.left: dict[str, list[str]] = {}
        self.told: dict[str, dict[str, ExpectedJob | None]] = {}
        """By job, those that it came after and that have ended, as they ended; None for one without a record."""

    def refuses(self, jobs: Sequence[NewJob]) -> bool:
        """Tell whether `enqueue` should raise `UnknownDependency`."""
        known = set(self.jobs)
        for new in jobs:
            old = self.jobs.get(new.id)
            begins = new.id not in known or (old is not None and old.state in BEGINS_ANEW)
            if begins and new.after_failure is AfterFailure.FAIL and not known.issuperset(new.after):
                return True
            known.add(new.id)
        return False

    def promote(self, ids: Iterable[str]) -> int:
        waiting = self._those(ids, (JobState.WAITING,))
        for job in waiting:
            self._release(job, timedelta(0))
        return len(waiting) + super().promote([job_id for job_id in ids if job_id not in {w.new.id for w in waiting}])

    def retry(self, ids: Iterable[str]) -> int:
        told = self.told.copy()
        count = super().retry(ids)
        self.told = told
        return count

    def _begin(
        self, new: NewJob, old: ExpectedJob | None, created_at: datetime, step: Step | None = None
    ) -> ExpectedJob:
        found = {job_id: self.jobs.get(job_id) for job_id in new.after}
        self.told[new.id] = {job_id: one for job_id, one in found.items() if one is None or one.state.is_final}
        left = [job_id for job_id, one in found.items() if one is not None and not one.state.is_final]
        failures = [(job_id, one) for job_id, one in found.items() if one is None or one.state in (*BEGINS_ANEW,)]
        gives_up = failures and new.after_failure is AfterFailure.FAIL
        if not left and not gives_up:
            return super()._begin(new, old, created_at, step)
        job = super()._begin(new, old, created_at, Step.AWAIT)
        self.left[new.id] = left
        if gives_up:
            job_id, one = failures[0]
            self._give_up(job, job_id, one)
        return job

    def _step(self, job: ExpectedJob, step: Step) -> None:
        before, target = job.state, after(job.state, step)
        super()._step(job, step)
        if before is JobState.WAITING and target is not JobState.WAITING:
            self.left.pop(job.new.id)
        if target is None:
            self.told.pop(job.new.id)
        if not before.is_final and (target is None or target.is_final):
            self._tell(job, None if target is None else job)

    def _tell(self, ended: ExpectedJob, record: ExpectedJob | None) -> None:
        completed = record is not None and record.state is JobState.COMPLETED
        for dependent in [name for name, left in self.left.items() if ended.new.id in left]:
            job = self.jobs[dependent]
            self.left[dependent].remove(ended.new.id)
            self.told[dependent][ended.new.id] = record
            if not completed and job.new.after_failure is AfterFailure.FAIL:
                self._give_up(job, ended.new.id, record)
            elif not self.left[dependent]:
                self._release(job, job.new.delay)

    def _give_up(self, job: ExpectedJob, dependency: str, ended: ExpectedJob | None) -> None:
        state, error = (None, None) if ended is None else (ended.state, ended.error)
        job.error = dependency_error(dependency, state, error)
        self._end(job, Step.GIVE_UP, job.new.keep_failed)

    def _release(self, job: ExpectedJob, delay: timedelta) -> None:
        job.run_at, job.moved = self.now + delay, True
        self._step(job, Step.FOLLOW_LATER if delay else Step.FOLLOW)

    def _debounce(self, job: ExpectedJob, new: NewJob) -> None:
        if job.state is not JobState.WAITING:
            super()._debounce(job, new)
            return
        self._step(job, Step.DEBOUNCE)
        job.new = replace(job.new, payload=new.payload, delay=new.delay)


KeyedName: TypeAlias = tuple[str, str]
"""A holding key, and a name."""


class ExpectedLimitedQueue(ExpectedGraph):
    """A queue, its limits, and which fair key is next."""

    def __init__(self, now: datetime, *, fresh_retries: bool = True) -> None:
        super().__init__(now, fresh_retries=fresh_retries)
        self.limits = ExpectedLimits()
        self._starts = 0
        self._queued: dict[str, int] = {}  # by job, after how many starts it was queued
        self._left: dict[KeyedName, int] = {}  # after how many starts one of these was last taken out of the line
        self._started: dict[KeyedName, int] = {}  # which start was the last of these
        self._met: set[str] = set()  # the keys of the jobs that started in this claim

    def claimed(self, claims: Sequence[Claim], worker_id: str, leases: Mapping[str, timedelta], limit: int) -> None:
        self._met.clear()
        super().claimed(claims, worker_id, leases, limit)

    def owed(self, names: Collection[str]) -> list[str]:
        """Return the jobs that another claim has to bring, if the last one brought fewer than it could."""
        return [job.new.id for job in self._claimable(names) if self._surely_passes(job)]

    def held_back(self, job_id: str) -> tuple[HeldBack | None, HeldBack | None]:
        """Return what `held_back` should answer, at best and at worst."""
        job = self.jobs.get(job_id)
        if job is None or job.state is not JobState.QUEUED:
            return None, None
        best, worst = self._own_limit(job)
        queue_best, queue_worst = self._queue_limit()
        return best or queue_best, worst or queue_worst

    def _own_limit(self, job: ExpectedJob) -> tuple[HeldBack | None, HeldBack | None]:
        key = job.new.limit_key
        if key is None:
            return None, None
        running = sum(one.new.limit_key == key for one in self._running())
        return self.limits.holds_back(key, running, self.now)

    def _queue_limit(self) -> tuple[HeldBack | None, HeldBack | None]:
        return self.limits.holds_back(LimitKey(WHOLE_QUEUE), len(self._running()), self.now)

    def _running(self) -> list[ExpectedJob]:
        return [job for job in self.jobs.values() if job.state is JobState.PROCESSING]

    def _surely_passes(self, job: ExpectedJob) -> bool:
        return self._own_limit(job)[1] is None and self._queue_limit()[1] is None

    def _claimable(self, names: Collection[str]) -> list[ExpectedJob]:
        if self._queue_limit()[0] is not None:
            return []
        return [job for job in super()._claimable(names) if self._own_limit(job)[0] is None]

    def _left_behind(self, names: Collection[str]) -> list[ExpectedJob]:
        may_come_later = (job for job in super()._left_behind(names) if _key(job) is None)
        return [job for job in may_come_later if self._surely_passes(job)]

    def _precedes(self, one: ExpectedJob, other: ExpectedJob) -> bool:
        key = _key(one)
        if key is None:
            return super()._precedes(one, other) or self._was_served(other, one)
        if key in self._met:
            return False
        if one.new.limit_key is not None:
            return super()._precedes(one, other) and self._surely_passes(one)
        return one.new.priority < other.new.priority or self._was_served(other, one)

    def _was_served(self, job: ExpectedJob, waiting: ExpectedJob) -> bool:
        """Tell whether the job's fair key was served while the other one was ready, and still is."""
        started = self._started.get(_keyed_name(job))
        fresh = not (job.attempts or job.moved or job.settled_by)
        if job.new.fair_key is None or started is None or not fresh or job.new.priority != waiting.new.priority:
            return False
        if _keyed_name(job) == _keyed_name(waiting):
            return False
        left = -1 if waiting.new.fair_key is None else self._left.get(_keyed_name(waiting), -1)
        return self._queued[waiting.new.id] < started and left < started

    def _begin(
        self, new: NewJob, old: ExpectedJob | None, created_at: datetime, step: Step | None = None
    ) -> ExpectedJob:
        job = super()._begin(new, old, created_at, step)
        self._queued[new.id] = self._starts
        return job

    def _step(self, job: ExpectedJob, step: Step) -> None:
        if job.state is JobState.QUEUED:
            self._left[_keyed_name(job)] = self._starts
        super()._step(job, step)
        self._queued[job.new.id] = self._starts

    def _start(self, job: ExpectedJob, claim: Claim, worker_id: str, leases: Mapping[str, timedelta]) -> None:
        super()._start(job, claim, worker_id, leases)
        self._starts += 1
        self._started[_keyed_name(job)] = self._starts
        self.limits.start(LimitKey(WHOLE_QUEUE), self.now)
        if job.new.limit_key is not None:
            self.limits.start(job.new.limit_key, self.now)
        if (key := _key(job)) is not None:
            self._met.add(key)


def _key(job: ExpectedJob) -> str | None:
    """Return the holding key of a job with a limit key or a fair key."""
    return None if job.new.ordering_key is not None else job.new.holding_key


def _keyed_name(job: ExpectedJob) -> KeyedName:
    return job.new.holding_key or "", job.new.name
