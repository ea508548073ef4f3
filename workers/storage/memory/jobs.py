"""The jobs of one in-memory queue, and the line that each of them waits in.

Theory of operation. Every change of state is one row of the transition table: `_step` asks `lifecycle.after` and files
the job under its new state. A waiting job is in exactly one line: `ready` (one per name, by priority and time),
`delayed` (by due time), or `parked` (its ordering key is busy). Due jobs move from `delayed` to `ready` when somebody
looks, so the passing of time needs no task of its own. All methods are synchronous: one call is one atomic step of the
event loop.

An ordering key is busy while a job with it is processing. Its other jobs are parked as they come up in a claim. When
the key is free again, the first of each name returns to its ready line, and no other job has to move.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Protocol, TypeAlias

from workers.jobs import DROP, ErrorInfo, JobEventKind, JobState, NewJob, Retention
from workers.lifecycle import Step, after
from workers.storage.base import ANY_NAME
from workers.storage.memory.keys import KeyTable
from workers.storage.memory.line import Line, is_over
from workers.storage.rules import bounded

Place: TypeAlias = tuple[int, datetime, int]


class Publisher(Protocol):
    """The receiver of what happens to the jobs."""

    def publish(self, kind: JobEventKind, job_id: str) -> None:
        """Announce what has just happened."""


@dataclass(slots=True, kw_only=True)
class StoredJob:
    """One generation of a job; `run_at` and `serial` are its place among jobs of one priority.

    `failures` is a text of `workers.storage.failures`.
    """

    new: NewJob
    state: JobState
    created_at: datetime
    run_at: datetime
    serial: int
    attempts: int = 0
    stalls: int = 0
    uncounted: int = 0
    token: str | None = None
    settled_by: str | None = None
    worker_id: str | None = None
    deadline: datetime | None = None
    cancel_requested: bool = False
    finished_at: datetime | None = None
    last_error: ErrorInfo | None = None
    failures: str | None = None
    result: bytes | None = None
    progress: bytes | None = None
    line: Line[Place] | None = None

    @property
    def waits(self) -> bool:
        """Whether the job could still be cancelled for good."""
        return self.state is not JobState.PROCESSING and not self.finished

    @property
    def finished(self) -> bool:
        return self.state.is_final

    @property
    def place(self) -> Place:
        return (self.new.priority, self.run_at, self.serial)


class JobTable(KeyTable):
    """Jobs by id and by state, the lines they wait in, and the dates at which records expire.

    `on_claimable` is called when a job, or the time until the next one, may have become claimable.
    """

    def __init__(self, publisher: Publisher, on_claimable: Callable[[], None]) -> None:
        super().__init__()
        self.by_state: dict[JobState, dict[str, StoredJob]] = {state: {} for state in JobState}
        self._jobs: dict[str, StoredJob] = {}
        self._publisher = publisher
        self.on_claimable = on_claimable
        self._next_serial = 0
        self._ready: dict[str, Line[Place]] = {}
        self._parked: dict[str, dict[str, Line[Place]]] = {}
        self._busy_keys: set[str] = set()
        self._delayed: Line[tuple[datetime]] = Line()
        self._expiring: Line[tuple[datetime]] = Line()

    # Reading

    def find(self, job_id: str, now: datetime) -> StoredJob | None:
        """Return the job as it stands at `now`, None when it is unknown or expired."""
        job = self._jobs.get(job_id)
        if job is None:
            return None
        if job.state in (JobState.SCHEDULED, JobState.FAILING) and job.run_at <= now:
            self._come_due(job)
        elif job.finished and is_over(self._expiring.key(job_id), now):
            self.expire(job)
            return None
        return job

    def ready_what_is_due(self, now: datetime) -> None:
        """Make every scheduled or failing job ready that is due by `now`."""
        while (head := self._delayed.head()) is not None and is_over(head[0], now):
            self._come_due(self._jobs[head[1]])

    def drop_expired(self, now: datetime) -> Iterator[str]:
        """Drop the records and holders that are over at `now`, yielding each id or key once it is gone."""
        while (head := self._expiring.head()) is not None and is_over(head[0], now):
            self.expire(self._jobs[head[1]])
            yield head[1]
        yield from self.free_what_is_over(now)

    def claimable(self, names: Collection[str]) -> bool:
        """Tell whether a job for these names is ready. Its ordering key may still turn out to be busy."""
        if ANY_NAME in names:
            return bool(self._ready)
        return any(name in self._ready for name in names)

    def next_due(self) -> datetime | None:
        """Return when the first delayed job comes due."""
        head = self._delayed.head()
        return None if head is None else head[0][0]

    def changed(self, job_id: str) -> None:
        """Note a change that is no event, unless the passing of time alone made it."""

    def debounce(self, job: StoredJob, new: NewJob, now: datetime) -> None:
        """Give the waiting job the payload of `new`, and let it wait as long as `new` would."""
        self._step_out(job)
        self._step(job, Step.DEBOUNCE)
        job.new = replace(job.new, payload=new.payload)
        job.run_at, job.serial = now + new.delay, self._next_serial
        self._next_serial += 1
        self._line_up(job)
        if job.new.ordering_key is not None:
            self._unpark(job.new.ordering_key)
        self.changed(job.new.id)

    # Steps into the queue

    def add(self, new: NewJob, now: datetime, *, created_at: datetime | None = None, step: Step | None = None) -> None:
        """Add a new generation of the id by `step`, by default due after its delay.

        `new.id` is unknown, failed or cancelled.
        """
        old = self._jobs.get(new.id)
        state = after(old.state if old else None, step or (Step.SCHEDULE if new.delay else Step.ENQUEUE))
        assert state is not None
        if old is not None:
            self._expiring.discard(new.id)
            del self.by_state[old.state][new.id]
        job = StoredJob(
            new=new, state=state, created_at=created_at or now, run_at=now + new.delay, serial=self._next_serial
        )
        self._next_serial += 1
        self._jobs[new.id] = self.by_state[state][new.id] = job
        self._line_up(job)
        self._publisher.publish(JobEventKind.QUEUED, new.id)

    def add_again(self, job: StoredJob, now: datetime) -> None:
        """Queue the failed or cancelled job with fresh attempts."""
        # A debounce would make it wait.
        again = replace(job.new, delay=timedelta(0), deduplication=None, after=())
        self.add(again, now, created_at=job.created_at)

    def promote(self, job: StoredJob, now: datetime) -> None:
        """Make the scheduled or failing job due now."""
        job.run_at = now
        self._come_due(job)
        self.changed(job.new.id)

    def _come_due(self, job: StoredJob) -> None:
        self._delayed.discard(job.new.id)
        self._step(job, Step.COME_DUE)
        self._line_up(job)

    # Claiming

    def take(self, names: Collection[str], limit: int) -> Iterator[StoredJob]:
        """Yield ready jobs in order, each processing by then. Jobs whose ordering key is busy are parked."""
        heads = [(head, name) for name in self._wanted(names) if (head := self._ready[name].head()) is not None]
        heapq.heapify(heads)
        while heads and limit > 0:
            (_, job_id), name = heads[0]
            job = self._jobs[job_id]
            self._step_out(job)
            if job.new.ordering_key in self._busy_keys:
                self._park(job)
            else:
                limit -= 1
                yield self._start(job)
            line = self._ready.get(name)
            head = line.head() if line is not None else None
            if head is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (head, name))

    def _wanted(self, names: Collection[str]) -> Collection[str]:
        return self._ready if ANY_NAME in names else [name for name in names if name in self._ready]

    def _start(self, job: StoredJob) -> StoredJob:
        self._step(job, Step.CLAIM)
        job.attempts += 1
        job.settled_by = None
        self.let_go(job.new.id, claimed=True)
        if job.new.ordering_key is not None:
            self._busy_keys.add(job.new.ordering_key)
        self._publisher.publish(JobEventKind.ACTIVE, job.new.id)
        return job

    # Steps out of processing

    def complete(self, job: StoredJob, now: datetime, result: bytes, keep: Retention | None) -> None:
        job.result = result
        self._end_attempt(job, Step.COMPLETE)
        self._finish(job, now, job.new.keep_completed if keep is None else keep)

    def fail(
        self, job: StoredJob, now: datetime, error: ErrorInfo, keep: Retention | None, step: Step = Step.FAIL
    ) -> None:
        job.last_error = error
        self._end_attempt(job, step)
        self._finish(job, now, job.new.keep_failed if keep is None else keep)

    def stop(self, job: StoredJob, now: datetime, keep: Retention | None) -> None:
        """End the attempt, and the job with it, because somebody cancelled it."""
        self._end_attempt(job, Step.STOP)
        self._finish(job, now, job.new.keep_failed if keep is None else keep)

    def continue_with(self, job: StoredJob, new: NewJob, now: datetime) -> None:
        """End the attempt and let the job go on as `new`, behind those that wait."""
        self._end_attempt(job, Step.CONTINUE_LATER if new.delay else Step.CONTINUE)
        job.new, job.run_at, job.serial = new, now + new.delay, self._next_serial
        job.attempts = job.stalls = job.uncounted = 0
        job.last_error = job.failures = None
        self._next_serial += 1
        self._line_up(job)
        self._publisher.publish(JobEventKind.QUEUED, new.id)

    def complete_from_outside(self, job: StoredJob, now: datetime, result: bytes, keep: Retention | None) -> None:
        """Complete the unfinished job from outside of any attempt."""
        self._take(job, Step.COMPLETE_FROM_OUTSIDE)
        job.result, job.settled_by = result, None
        self._finish(job, now, job.new.keep_completed if keep is None else keep)

    def retry_later(self, job: StoredJob, error: ErrorInfo, due: datetime) -> None:
        job.last_error = error
        self._end_attempt(job, Step.RETRY)
        job.run_at = due
        self._line_up(job)
        self._publisher.publish(JobEventKind.FAILING, job.new.id)

    def requeue(self, job: StoredJob, step: Step) -> None:
        """End the attempt, by release or a lost lease, and put the job back where it was."""
        self._end_attempt(job, step)
        self._line_up(job)
        self._publisher.publish(JobEventKind.QUEUED, job.new.id)

    def extend(self, job: StoredJob, deadline: datetime) -> None:
        """Let the lease of the job's claim end at `deadline`."""
        job.deadline = deadline
        self.changed(job.new.id)

    def request_cancel(self, job: StoredJob) -> None:
        """Record that the running job is to be cancelled, for its worker to learn."""
        job.cancel_requested = True
        self._publisher.publish(JobEventKind.CANCEL_REQUESTED, job.new.id)

    def report(self, job: StoredJob, progress: bytes) -> None:
        """Store how far the running job has come."""
        job.progress = progress
        self._publisher.publish(JobEventKind.PROGRESS, job.new.id)

    def _end_attempt(self, job: StoredJob, step: Step) -> None:
        self._step(job, step)
        stalled = step in (Step.STALL, Step.EXHAUST)
        job.settled_by = None if stalled else job.token
        # A request to cancel survives a crash of the worker it was meant for, but not the settlement of the attempt.
        job.cancel_requested = job.cancel_requested and stalled
        job.token = job.worker_id = job.deadline = None
        if job.new.ordering_key is not None:
            self._busy_keys.discard(job.new.ordering_key)
            self._unpark(job.new.ordering_key)

    def _finish(self, job: StoredJob, now: datetime, keep: Retention) -> None:
        self.let_go(job.new.id)
        job.finished_at = now
        told = JobEventKind(job.state.value)
        if keep is DROP:
            self.expire(job)
        else:
            self.keep(job, now + bounded(keep))
        self._publisher.publish(told, job.new.id)

    # Steps out of the table

    def keep(self, job: StoredJob, until: datetime) -> None:
        """Let the finished job's record expire at `until`."""
        self._expiring.add((until,), job.new.id)
        self.changed(job.new.id)

    def expire(self, job: StoredJob) -> None:
        """Drop the finished job's record."""
        self._expiring.discard(job.new.id)
        self._step(job, Step.EXPIRE)
        self.changed(job.new.id)

    def cancel(self, job: StoredJob, now: datetime) -> None:
        """Cancel the waiting job, whose record then lasts as long as that of a failed one."""
        self._take(job, Step.CANCEL)
        job.settled_by = None
        self._finish(job, now, job.new.keep_failed)

    def drop(self, job: StoredJob, now: datetime) -> None:
        """Remove the unfinished job without a trace."""
        self.let_go(job.new.id)
        self._take(job, Step.REMOVE)
        self.changed(job.new.id)

    def _take(self, job: StoredJob, step: Step) -> None:
        """Take the job out of its line, or void its claim and tell its worker to look."""
        if job.state is JobState.PROCESSING:
            self._end_attempt(job, step)
            self._publisher.publish(JobEventKind.CANCEL_REQUESTED, job.new.id)
            return
        self._step(job, step)
        self._step_out(job)
        self._delayed.discard(job.new.id)
        if job.new.ordering_key is not None:
            self._unpark(job.new.ordering_key)

    def _step(self, job: StoredJob, step: Step) -> None:
        target = after(job.state, step)
        del self.by_state[job.state][job.new.id]
        if target is None:
            del self._jobs[job.new.id]
        else:
            job.state = target
            self.by_state[target][job.new.id] = job

    # Lines

    def _line_up(self, job: StoredJob) -> None:
        if job.state is JobState.QUEUED:
            self._stand(job, self._ready)
            self.on_claimable()
            return
        self._delayed.add((job.run_at,), job.new.id)
        if self.next_due() == job.run_at:
            self.on_claimable()

    def _stand(self, job: StoredJob, lines: dict[str, Line[Place]]) -> None:
        job.line = lines.get(job.new.name)
        if job.line is None:
            job.line = lines[job.new.name] = Line()
        job.line.add(job.place, job.new.id)

    def _step_out(self, job: StoredJob) -> None:
        if job.line is None:
            return
        job.line.discard(job.new.id)
        if not job.line:
            self._close(job, job.line)
        job.line = None

    def _close(self, job: StoredJob, line: Line[Place]) -> None:
        """Delete the line when it is empty, so that names and keys that come and go take no memory."""
        name, key = job.new.name, job.new.ordering_key
        if self._ready.get(name) is line:
            del self._ready[name]
        elif key is not None:
            lines = self._parked[key]
            del lines[name]
            if not lines:
                del self._parked[key]

    def _park(self, job: StoredJob) -> None:
        assert job.new.ordering_key is not None
        self._stand(job, self._parked.setdefault(job.new.ordering_key, {}))

    def _unpark(self, key: str) -> None:
        if key in self._busy_keys:
            return
        for line in list(self._parked.get(key, {}).values()):
            head = line.head()
            assert head is not None, "empty lines are closed"
            job = self._jobs[head[1]]
            self._step_out(job)
            self._line_up(job)
