"""The jobs of one in-memory queue, and how they change.

Theory of operation. Every change of state is one row of the transition table: `_step` asks `lifecycle.after` and files
the job under its new state. A waiting job is in a line of `lines`. Due jobs move from `delayed` to `ready` when
somebody looks, so the passing of time needs no task of its own. All methods are synchronous: one call is one atomic
step of the event loop.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from workers.jobs import DROP, ErrorInfo, JobEventKind, JobRecord, JobState, JobStatus, NewJob, Retention
from workers.lifecycle import Step, after
from workers.limits import QUEUE_KEY, WHOLE_QUEUE
from workers.retention import kept_for_waiters, told_with_the_end
from workers.storage.failures import decode_failures
from workers.storage.memory.line import Line, is_over
from workers.storage.memory.lines import LineTable, Publisher, StoredJob
from workers.storage.rules import bounded

MOST_PARKED: Final = 4_000
"""How many jobs one claim parks at most, so that no other step waits for long."""


class JobTable(LineTable):
    """Jobs by id and by state, and the dates at which records expire.

    `on_claimable` is called when a job, or the time until the next one, may have become claimable.
    """

    def __init__(self, publisher: Publisher, on_claimable: Callable[[], None]) -> None:
        super().__init__(on_claimable)
        self._publisher = publisher
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
        for key in self.limits.opened(now):
            self._unpark(key)

    def drop_expired(self, now: datetime) -> Iterator[str]:
        """Drop the records and holders that are over at `now`, yielding each id or key once it is gone."""
        while (head := self._expiring.head()) is not None and is_over(head[0], now):
            self.expire(self._jobs[head[1]])
            yield head[1]
        yield from self.free_what_is_over(now)
        yield from self.limits.sweep(now)

    def debounce(self, job: StoredJob, new: NewJob, now: datetime) -> None:
        """Give the waiting job the payload of `new`, and let it wait as long as `new` would."""
        self._step_out(job)
        self._step(job, Step.DEBOUNCE)
        job.new = replace(job.new, payload=new.payload)
        job.run_at, job.serial = now + new.delay, self._next_serial
        self._next_serial += 1
        self._line_up(job)
        if job.new.holding_key is not None:
            self._unpark(job.new.holding_key)
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

    def take(self, names: Collection[str], limit: int, now: datetime) -> Iterator[StoredJob]:
        """Yield ready jobs in order, each processing by then. Jobs whose key is closed are parked.

        After it has parked many it ends, although there may be more that are ready.
        """
        closed: set[str] = set()
        to_park = MOST_PARKED
        heads = [(head, name) for name in self._wanted(names) if (head := self._ready[name].head()) is not None]
        heapq.heapify(heads)
        while heads and limit > 0 and to_park > 0 and self.limits.queue_closed_until(now) is None:
            (_, job_id), name = heads[0]
            job = self._jobs[job_id]
            self._step_out(job)
            if (key := job.new.holding_key) is not None and self._is_closed(key, closed, now):
                to_park -= 1
                self._park(job, key)
            else:
                limit -= 1
                yield self._start(job, now)
            line = self._ready.get(name)
            head = line.head() if line is not None else None
            if head is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (head, name))

    def _start(self, job: StoredJob, now: datetime) -> StoredJob:
        self._step(job, Step.CLAIM)
        job.attempts += 1
        job.settled_by = None
        self.let_go(job.new.id, claimed=True)
        if WHOLE_QUEUE in self.limits.declared:
            self.limits.take_token(QUEUE_KEY, now)
        if (key := job.new.holding_key) is not None:
            self.limits.began(key)
            self.limits.take_token(key, now)
            self._let_next_pass(job, key, now)
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
        self._go_on(job, new, now)

    def continue_from_outside(self, job: StoredJob, new: NewJob, now: datetime) -> None:
        """Let the unfinished job go on as `new`, behind those that wait, from outside of any attempt."""
        self._take(job, Step.CONTINUE_FROM_OUTSIDE_LATER if new.delay else Step.CONTINUE_FROM_OUTSIDE)
        job.settled_by = None
        self._go_on(job, new, now)

    def _go_on(self, job: StoredJob, new: NewJob, now: datetime) -> None:
        job.new, job.run_at, job.serial = new, now + new.delay, self._next_serial
        job.attempts = job.stalls = job.uncounted = 0
        job.last_error = job.failures = job.moved_back = None
        self._next_serial += 1
        self._line_up(job)
        self._publisher.publish(JobEventKind.QUEUED, new.id)

    def complete_from_outside(self, job: StoredJob, now: datetime, result: bytes, keep: Retention | None) -> None:
        """Complete the unfinished job from outside of any attempt."""
        job.result = result
        self._take(job, Step.COMPLETE_FROM_OUTSIDE)
        job.settled_by = None
        keep = job.new.keep_completed if keep is None else keep
        self._finish(job, now, kept_for_waiters(result, keep))

    def retry_later(self, job: StoredJob, error: ErrorInfo, due: datetime) -> None:
        job.last_error = error
        self._put_off(job, Step.RETRY, due, JobEventKind.FAILING)

    def snooze(self, job: StoredJob, due: datetime) -> None:
        """End the attempt, which did not happen, and let the job wait until it is due."""
        step = Step.SNOOZE if job.last_error is None else Step.SNOOZE_AGAIN
        self._put_off(job, step, due, JobEventKind.QUEUED)

    def _put_off(self, job: StoredJob, step: Step, due: datetime, told: JobEventKind) -> None:
        self._end_attempt(job, step)
        job.run_at = due
        self._line_up(job)
        self._publisher.publish(told, job.new.id)

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
        if WHOLE_QUEUE in self.limits.declared:
            self.on_claimable()
        if (key := job.new.holding_key) is not None:
            self.limits.ended(key)
            self._unpark(key)

    def _finish(self, job: StoredJob, now: datetime, keep: Retention) -> None:
        self.let_go(job.new.id)
        job.finished_at = now
        told = JobEventKind(job.state.value)
        if keep is DROP:
            self.expire(job)
        else:
            self.keep(job, now + bounded(keep))
        result = None if job.result is None else told_with_the_end(job.result, keep)
        self._publisher.publish(told, job.new.id, result)

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
        if job.new.holding_key is not None:
            self._unpark(job.new.holding_key)

    def _step(self, job: StoredJob, step: Step) -> None:
        target = after(job.state, step)
        del self.by_state[job.state][job.new.id]
        if target is None:
            del self._jobs[job.new.id]
        else:
            job.state = target
            self.by_state[target][job.new.id] = job


def status_of(job: StoredJob, waits_for: int) -> JobStatus:
    """Return the job as it stands; `waits_for` counts the jobs that it still follows."""
    delayed = job.state in (JobState.SCHEDULED, JobState.FAILING)
    return JobStatus(
        id=job.new.id,
        name=job.new.name,
        state=job.state,
        attempt=job.attempts,
        max_attempts=job.new.max_attempts,
        created_at=job.created_at,
        priority=job.new.priority,
        chain_index=job.new.chain_index,
        next_run_at=job.run_at if delayed else None,
        finished_at=job.finished_at,
        worker_id=job.worker_id,
        last_error=job.last_error,
        encoded_progress=job.progress,
        waits_for=waits_for,
    )


def record_of(job: StoredJob, status: JobStatus) -> JobRecord:
    """Return all that is kept of the job."""
    return JobRecord(
        status=status,
        payload=job.new.payload,
        result=job.result if job.state is JobState.COMPLETED else None,
        failures=decode_failures(job.failures),
        meta=job.new.meta,
    )
