"""The jobs of a journal in memory: it notes what a step changed in them, and takes in the changes of others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from datetime import datetime

from workers.jobs import AfterFailure, JobEventKind, JobOutcome, JobState, NewJob
from workers.lifecycle import Step
from workers.limits import WHOLE_QUEUE, Limit
from workers.storage.memory.dependents import DependentTable
from workers.storage.memory.line import KeyHolder
from workers.storage.memory.lines import StoredJob


class Changes:
    """What has happened since changes were last written down."""

    def __init__(self) -> None:
        self.jobs: dict[str, list[JobEventKind]] = {}
        self.results: dict[str, bytes] = {}
        self.added: set[str] = set()
        self.workers: dict[str, datetime | None] = {}
        self.keys: set[str] = set()
        self.crons: set[str] = set()
        self.limits: set[str] = set()
        self.buckets: set[str] = set()
        self.met: list[tuple[str, str]] = []
        self.paused: bool | None = None
        self.wake = False

    def __bool__(self) -> bool:
        changed = self.jobs or self.workers or self.keys or self.crons or self.limits or self.buckets
        return bool(changed) or self.paused is not None

    def clear(self) -> None:
        """Forget the changes: they were written down."""
        self.jobs.clear()
        self.results.clear()
        self.added.clear()
        self.workers.clear()
        self.keys.clear()
        self.crons.clear()
        self.limits.clear()
        self.buckets.clear()
        self.met.clear()
        self.paused = None
        self.wake = False

    def publish(self, kind: JobEventKind, job_id: str, result: bytes | None = None) -> None:
        self.jobs.setdefault(job_id, []).append(kind)
        if result is not None:
            self.results[job_id] = result

    def claimable(self) -> None:
        self.wake = True


class FileTable(DependentTable):
    """A job table that notes which jobs changed, and takes in jobs as other processes wrote them."""

    def __init__(self, changes: Changes) -> None:
        super().__init__(changes, changes.claimable)
        self._changes = changes

    def add(self, new: NewJob, now: datetime, *, created_at: datetime | None = None, step: Step | None = None) -> None:
        super().add(new, now, created_at=created_at, step=step)
        self._changes.added.add(new.id)

    def _go_on(self, job: StoredJob, new: NewJob, now: datetime) -> None:
        super()._go_on(job, new, now)
        self._changes.added.add(new.id)

    def debounce(self, job: StoredJob, new: NewJob, now: datetime) -> None:
        super().debounce(job, new, now)
        self._changes.added.add(job.new.id)

    def give(self, key: str, holder: KeyHolder | None) -> None:
        super().give(key, holder)
        self._changes.keys.add(key)

    def met(self, dependent: str, dependency: str) -> None:
        self._changes.met.append((dependent, dependency))

    def limit_changed(self, name: str) -> None:
        self._changes.limits.add(name)

    def bucket_changed(self, key: str) -> None:
        self._changes.buckets.add(key)

    def changed(self, job_id: str) -> None:
        self._changes.jobs.setdefault(job_id, [])

    def get(self, job_id: str) -> StoredJob | None:
        """Return the job as it was last written or changed, whatever the time is."""
        return self._jobs.get(job_id)

    def kept_until(self, job_id: str) -> datetime | None:
        """Return when the record of the finished job expires."""
        key = self._expiring.key(job_id)
        return None if key is None else key[0]

    def everyone(self) -> list[StoredJob]:
        """Return all jobs."""
        return list(self._jobs.values())

    def every_holder(self) -> list[tuple[str, KeyHolder]]:
        """Return every deduplication key, and who has it."""
        return list(self._holders.items())

    def current_holder(self, key: str) -> KeyHolder | None:
        """Return who has the key now; another process may have taken it since a change here that is not written yet."""
        return self._holders.get(key)

    def restore_holder(self, key: str, holder: KeyHolder | None) -> None:
        """Set the key as it was written elsewhere."""
        super().give(key, holder)
        self._changes.keys.discard(key)

    def restore(self, job: StoredJob, kept_until: datetime | None, *, anew: bool) -> None:
        """Put the job into the table as it is, replacing what was known of its id. Nobody is told.

        With `anew`, how those ended that it came after is written behind it.
        """
        job_id = job.new.id
        known = self._jobs.get(job_id)
        if known is not None and not anew:
            job.outcomes = known.outcomes
        key = job.new.holding_key
        if known is not None and known.state is job.state is JobState.PROCESSING and known.new.holding_key == key:
            self._jobs[job_id] = self.by_state[JobState.PROCESSING][job_id] = job
            return  # it has its place still, for which nobody has to be woken
        self.forget(job_id)
        self._jobs[job_id] = self.by_state[job.state][job_id] = job
        serial = job.serial if job.moved_back is None else max(job.serial, job.moved_back[1])
        self._next_serial = max(self._next_serial, serial + 1)
        if job.waits:
            self._line_up(job)
        elif kept_until is not None:
            self._expiring.add((kept_until,), job_id)
        elif job.state is JobState.PROCESSING and key is not None:
            self.limits.began(key)

    def left(self, job_id: str) -> Iterable[str]:
        """Return the jobs that the waiting one still follows."""
        return self._left.get(job_id, ())

    def restore_wait(self, job_id: str, after_failure: AfterFailure, left: Collection[str]) -> None:
        """Let a job that is in the table wait for those in `left`, as was written elsewhere."""
        job = self._jobs[job_id]
        job.new = replace(job.new, after_failure=after_failure)
        self._wait_no_more(job_id)
        self._wait_for(job_id, left)

    def shorten_wait(self, job_id: str, dependency: str) -> None:
        """Let the job wait for that one no more, as was written elsewhere."""
        if self._left.get(job_id, {}).pop(dependency, job_id) is None:
            self._drop_dependent(dependency, job_id)

    def outcomes(self, job_id: str) -> Mapping[str, JobOutcome | None]:
        """Return how those ended that the job came after, as far as they have."""
        return self._jobs[job_id].outcomes or {}

    def restore_outcome(self, job_id: str, dependency: str, outcome: JobOutcome | None) -> None:
        """Let the job know how one ended that it came after, as was written elsewhere."""
        job = self._jobs[job_id]
        job.outcomes = {} if job.outcomes is None else job.outcomes
        job.outcomes[dependency] = outcome

    def forget(self, job_id: str) -> None:
        """Leave nothing of the job, nor of what a look at the clock changed in it: the journal knows it better."""
        self._changes.jobs.pop(job_id, None)
        job = self._jobs.pop(job_id, None)
        if job is None:
            return
        del self.by_state[job.state][job_id]
        self._wait_no_more(job_id)
        self._step_out(job)
        self._delayed.discard(job_id)
        self._expiring.discard(job_id)
        if job.state is JobState.PROCESSING and WHOLE_QUEUE in self.limits.declared:
            self.on_claimable()
        key = job.new.holding_key
        if key is not None and not job.finished:
            if job.state is JobState.PROCESSING:
                self.limits.ended(key)
            self._unpark(key)

    # Limits

    def restore_limit(self, name: str, limit: Limit | None) -> None:
        """Keep the limit, or none of that name, as was written elsewhere."""
        if limit is None:
            self.limits.declared.pop(name, None)
        else:
            self.limits.declared[name] = limit
        self._look_again(name)

    def restore_bucket(self, key: str, full_at: datetime | None) -> None:
        """Set when the bucket of the key is full, None for now, as was written elsewhere."""
        self.limits.restore_bucket(key, full_at)
        self._changes.buckets.discard(key)
