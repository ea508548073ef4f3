"""The expected content of a queue in which limits keep jobs back and fair keys take turns.

What may be claimed is said at best, and what has to be at worst: see `ExpectedLimits`. A storage parks the jobs that it
keeps back, and one claim need not see those that come up in it. So of jobs with a limit key or a fair key a claim may
bring fewer than there are, and their order is only asked for where nothing of their key came up in the same claim.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TypeAlias

from workers.gates import WHOLE_QUEUE, HeldBack, LimitKey
from workers.jobs import Claim, JobState, NewJob
from workers.lifecycle import Step
from workers.testing.expected import ExpectedJob
from workers.testing.expected_dependents import ExpectedGraph
from workers.testing.expected_limits import ExpectedLimits

Turn: TypeAlias = tuple[str, str]
"""A fair key, or the gate of a limit, and a name."""


class ExpectedGates(ExpectedGraph):
    """A queue, its limits, and whose turn it is in it."""

    def __init__(self, now: datetime, *, fresh_retries: bool = True) -> None:
        super().__init__(now, fresh_retries=fresh_retries)
        self.limits = ExpectedLimits()
        self._starts = 0
        self._queued: dict[str, int] = {}  # by job, after how many starts it was queued
        self._left: dict[Turn, int] = {}  # after how many starts one of these was last taken out of the line
        self._started: dict[Turn, int] = {}  # which start was the last of these
        self._met: set[str] = set()  # the gates of the jobs that started in this claim

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
        best, worst = self._own_gate(job)
        queue_best, queue_worst = self._queue_gate()
        return best or queue_best, worst or queue_worst

    def _own_gate(self, job: ExpectedJob) -> tuple[HeldBack | None, HeldBack | None]:
        key = job.new.limit_key
        if key is None:
            return None, None
        running = sum(one.new.limit_key == key for one in self._running())
        return self.limits.holds_back(key, running, self.now)

    def _queue_gate(self) -> tuple[HeldBack | None, HeldBack | None]:
        return self.limits.holds_back(LimitKey(WHOLE_QUEUE), len(self._running()), self.now)

    def _running(self) -> list[ExpectedJob]:
        return [job for job in self.jobs.values() if job.state is JobState.PROCESSING]

    def _surely_passes(self, job: ExpectedJob) -> bool:
        return self._own_gate(job)[1] is None and self._queue_gate()[1] is None

    def _claimable(self, names: Collection[str]) -> list[ExpectedJob]:
        if self._queue_gate()[0] is not None:
            return []
        return [job for job in super()._claimable(names) if self._own_gate(job)[0] is None]

    def _left_behind(self, names: Collection[str]) -> list[ExpectedJob]:
        may_come_later = (job for job in super()._left_behind(names) if _gate(job) is None)
        return [job for job in may_come_later if self._surely_passes(job)]

    def _precedes(self, one: ExpectedJob, other: ExpectedJob) -> bool:
        gate = _gate(one)
        if gate is None:
            return super()._precedes(one, other) or self._had_its_turn(other, one)
        if gate in self._met:
            return False
        if one.new.limit_key is not None:
            return super()._precedes(one, other) and self._surely_passes(one)
        return one.new.priority < other.new.priority or self._had_its_turn(other, one)

    def _had_its_turn(self, job: ExpectedJob, waiting: ExpectedJob) -> bool:
        """Tell whether the job's fair key had a turn when the other one was ready, which is still due."""
        started = self._started.get(_turn(job))
        fresh = not (job.attempts or job.moved or job.settled_by)
        if job.new.fair_key is None or started is None or not fresh or job.new.priority != waiting.new.priority:
            return False
        if _turn(job) == _turn(waiting):
            return False
        left = -1 if waiting.new.fair_key is None else self._left.get(_turn(waiting), -1)
        return self._queued[waiting.new.id] < started and left < started

    def _begin(
        self, new: NewJob, old: ExpectedJob | None, created_at: datetime, step: Step | None = None
    ) -> ExpectedJob:
        job = super()._begin(new, old, created_at, step)
        self._queued[new.id] = self._starts
        return job

    def _step(self, job: ExpectedJob, step: Step) -> None:
        if job.state is JobState.QUEUED:
            self._left[_turn(job)] = self._starts
        super()._step(job, step)
        self._queued[job.new.id] = self._starts

    def _start(self, job: ExpectedJob, claim: Claim, worker_id: str, leases: Mapping[str, timedelta]) -> None:
        super()._start(job, claim, worker_id, leases)
        self._starts += 1
        self._started[_turn(job)] = self._starts
        self.limits.start(LimitKey(WHOLE_QUEUE), self.now)
        if job.new.limit_key is not None:
            self.limits.start(job.new.limit_key, self.now)
        if (gate := _gate(job)) is not None:
            self._met.add(gate)


def _gate(job: ExpectedJob) -> str | None:
    """Return the gate of a job with a limit key or a fair key."""
    return None if job.new.ordering_key is not None else job.new.gate


def _turn(job: ExpectedJob) -> Turn:
    return job.new.gate or "", job.new.name
