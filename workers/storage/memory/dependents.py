"""The jobs of an in-memory queue that wait until others have ended.

Theory of operation. Each change of state passes `_step`, so no end of a job is missed, whichever verb makes it. Ends
are noted there and worked off by the verb's step once the ended job is as it stays: jobs that fail because of it are
ends as well, and go to the end of the same list, so that no run of jobs is too long for a recursion.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from workers.errors import UnknownDependency
from workers.jobs import (
    AfterFailure,
    ErrorInfo,
    JobEventKind,
    JobOutcome,
    JobState,
    NewJob,
    OutcomeKind,
    Retention,
)
from workers.lifecycle import Step, after
from workers.storage.memory.jobs import JobTable
from workers.storage.memory.lines import Publisher, StoredJob
from workers.storage.rules import STARTS_ANEW, bounded_count, copied, dependency_error


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedDependency:
    """A job that others may follow, and how it ended; with `state` None there is no record of it."""

    id: str
    state: JobState | None
    error: ErrorInfo | None = None
    result: bytes | None = field(default=None, repr=False)

    @classmethod
    def of(cls, job: StoredJob, state: JobState | None) -> EndedDependency:
        return cls(id=job.new.id, state=state, error=job.last_error, result=job.result)

    @property
    def outcome(self) -> JobOutcome | None:
        """What those that follow it are told; see `KnowsDependencies.outcomes`."""
        if self.state is None:
            return None
        completed, failed = self.state is JobState.COMPLETED, self.state is JobState.FAILED
        return JobOutcome(
            kind=OutcomeKind(self.state.value),
            result=copied(self.result) if completed else None,
            error=self.error if failed else None,
        )

    def lets_run(self, new: NewJob) -> bool:
        """Tell whether `new`, which follows it, may still run."""
        return self.state is JobState.COMPLETED or new.after_failure is AfterFailure.RUN


@dataclass(slots=True)
class _Standing:
    """The jobs that one is to follow: those that have not ended, those that have, and the first that keeps it back."""

    left: list[str] = field(default_factory=list)
    ended: list[EndedDependency] = field(default_factory=list)
    obstacle: EndedDependency | None = None

    @property
    def lets_run(self) -> bool:
        return not self.left and self.obstacle is None


class DependentTable(JobTable):
    """A job table with jobs that wait for others in it."""

    def __init__(self, publisher: Publisher, on_claimable: Callable[[], None]) -> None:
        super().__init__(publisher, on_claimable)
        self._dependents: dict[str, dict[str, None]] = {}
        self._left: dict[str, dict[str, None]] = {}  # by dependent, the jobs that it still follows
        self._ended: deque[EndedDependency] = deque()
        self._resolving = False

    def waits_for(self, job_id: str) -> int:
        """Return how many jobs the waiting one still follows."""
        return len(self._left.get(job_id, ()))

    def followed(self, job_id: str) -> list[str]:
        """Return the jobs that the waiting one still follows."""
        return list(self._left.get(job_id, ()))

    def followers(self, job_id: str, limit: int) -> list[str]:
        """Return the first jobs that wait for this one."""
        return list(itertools.islice(self._dependents.get(job_id, ()), bounded_count(limit)))

    def refuse_unknown(self, jobs: Sequence[NewJob], now: datetime) -> None:
        """Accept jobs unless a new one must know how another ended, of which nothing is known.

        Raises:
            UnknownDependency: there is one.
        """
        earlier: set[str] = set()
        for job in jobs:
            known = self.find(job.id, now)
            is_new = job.id not in earlier and (known is None or known.state in STARTS_ANEW)
            if is_new and job.after_failure is AfterFailure.FAIL:
                unknown = [one for one in job.after if one not in earlier and self.find(one, now) is None]
                if unknown:
                    raise UnknownDependency(job.id, unknown)
            earlier.add(job.id)

    def add_after(self, new: NewJob, now: datetime) -> None:
        """Add the job, which waits for those that it follows and that have not ended."""
        standing = self._standing_of(new, now)
        self.add(new, now, step=None if standing.lets_run else Step.AWAIT)
        self._begin_after(self._jobs[new.id], now, standing)

    def add_again(self, job: StoredJob, now: datetime) -> None:
        super().add_again(job, now)
        self._jobs[job.new.id].outcomes = job.outcomes

    def continue_with(self, job: StoredJob, new: NewJob, now: datetime) -> None:
        standing = self._standing_of(new, now)
        if standing.lets_run:
            super().continue_with(job, new, now)
        else:
            self._end_attempt(job, Step.CONTINUE_AFTER)
            self._go_on(job, new, now)
        if new.after:
            self._begin_after(job, now, standing)

    def _begin_after(self, job: StoredJob, now: datetime, standing: _Standing) -> None:
        """Note which of the others have ended; let the job wait for those that are left, or fail it because of one."""
        job.outcomes = {one.id: one.outcome for one in standing.ended}
        if standing.obstacle is not None:
            self._give_up(job, now, standing.obstacle)
        elif standing.left:
            self._wait_for(job.new.id, standing.left)

    def _standing_of(self, new: NewJob, now: datetime) -> _Standing:
        standing = _Standing()
        for dependency in new.after:
            found = self.find(dependency, now)
            if found is not None and not found.finished:
                standing.left.append(dependency)
                continue
            ended = EndedDependency(id=dependency, state=None)
            if found is not None:
                ended = EndedDependency.of(found, found.state)
            standing.ended.append(ended)
            if standing.obstacle is None and not ended.lets_run(new):
                standing.obstacle = ended
        return standing

    def _give_up(self, job: StoredJob, now: datetime, ended: EndedDependency) -> None:
        """Fail the waiting job because of the end of one that it follows."""
        job.last_error = dependency_error(ended.id, ended.state, ended.error)
        self._step(job, Step.GIVE_UP)
        self._finish(job, now, job.new.keep_failed)

    def debounce(self, job: StoredJob, new: NewJob, now: datetime) -> None:
        if job.state is not JobState.WAITING:
            super().debounce(job, new, now)
            return
        self._step(job, Step.DEBOUNCE)
        job.new = replace(job.new, payload=new.payload, delay=new.delay)
        self.changed(job.new.id)

    def promote(self, job: StoredJob, now: datetime) -> None:
        if job.state is JobState.WAITING:
            self._release(job, now, timedelta(0))
        else:
            super().promote(job, now)

    def drop(self, job: StoredJob, now: datetime) -> None:
        super().drop(job, now)
        if self._ended:
            self._resolve(now)

    def _finish(self, job: StoredJob, now: datetime, keep: Retention) -> None:
        super()._finish(job, now, keep)
        if self._ended:
            self._resolve(now)

    def _line_up(self, job: StoredJob) -> None:
        if job.state is not JobState.WAITING:
            super()._line_up(job)

    def _step(self, job: StoredJob, step: Step) -> None:
        before = job.state
        super()._step(job, step)
        if self._left:
            self._note(job, before, after(before, step))

    def _note(self, job: StoredJob, before: JobState, target: JobState | None) -> None:
        if before is JobState.WAITING and target is not JobState.WAITING:
            self._wait_no_more(job.new.id)
        if not before.is_final and (target is None or target.is_final) and job.new.id in self._dependents:
            self._ended.append(EndedDependency.of(job, target))

    def _resolve(self, now: datetime) -> None:
        """Release or fail all who wait for what has ended."""
        if self._resolving:
            return
        self._resolving = True
        while self._ended:
            ended = self._ended.popleft()
            for dependent in self._dependents.pop(ended.id, ()):
                self._let_know(self._jobs[dependent], ended, now)
        self._resolving = False

    def _let_know(self, job: StoredJob, ended: EndedDependency, now: datetime) -> None:
        left = self._left[job.new.id]
        del left[ended.id]
        job.outcomes = {} if job.outcomes is None else job.outcomes
        job.outcomes[ended.id] = ended.outcome
        self.met(job.new.id, ended.id)
        if not ended.lets_run(job.new):
            self._give_up(job, now, ended)
        elif not left:
            self._release(job, now, job.new.delay)

    def met(self, dependent: str, dependency: str) -> None:
        """Note that the job no longer waits for that one."""

    def _release(self, job: StoredJob, now: datetime, delay: timedelta) -> None:
        self._step(job, Step.FOLLOW_LATER if delay else Step.FOLLOW)
        job.run_at, job.serial = now + delay, self._next_serial
        self._next_serial += 1
        self._line_up(job)
        self._publisher.publish(JobEventKind.QUEUED, job.new.id)

    def _wait_for(self, dependent: str, left: Collection[str]) -> None:
        self._left[dependent] = dict.fromkeys(left)
        for dependency in left:
            self._dependents.setdefault(dependency, {})[dependent] = None

    def _wait_no_more(self, dependent: str) -> None:
        for dependency in self._left.pop(dependent, ()):
            self._drop_dependent(dependency, dependent)

    def _drop_dependent(self, dependency: str, dependent: str) -> None:
        those = self._dependents[dependency]
        del those[dependent]
        if not those:
            del self._dependents[dependency]
