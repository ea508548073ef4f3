"""The expected content of a queue in which jobs follow others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from workers.jobs import AfterFailure, JobState, NewJob
from workers.lifecycle import Step, after
from workers.storage.rules import dependency_error
from workers.testing.expected import BEGINS_ANEW, ExpectedJob, ExpectedQueue


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
