"""The state that a journal adds up to, and the frames that bring it forward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from workers.jobs import CronRow, JobEventKind, JobState
from workers.storage.file.codec import (
    BadEntry,
    Change,
    JobChanged,
    JobGone,
    KeyGiven,
    Paused,
    QueueNamed,
    WorkerSeen,
    gone_entry,
    job_entry,
    key_entry,
    pause_entry,
    queue_entry,
    worker_entry,
)
from workers.storage.file.declared import (
    BucketChanged,
    CronReplaced,
    LimitDeclared,
    bucket_entry,
    cron_entry,
    limit_entry,
)
from workers.storage.file.frames import Entry
from workers.storage.file.table import Changes, FileTable
from workers.storage.file.waits import (
    OutcomeLearned,
    WaitBegun,
    WaitShortened,
    outcome_entry,
    shortened_entry,
    wait_entry,
)
from workers.storage.memory.steps import QueueSteps
from workers.storage.subscribers import Told

_SEEN_AGAIN: Final = timedelta(seconds=30)
"""How old a worker's record must be before another sign of it is written down."""

_SNAPSHOT_JOBS: Final = 200
"""How many jobs one frame of a snapshot holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalStep:
    """What one step changed: to be written, and then announced."""

    entries: list[Entry]
    blobs: list[bytes]
    events: list[Told]
    wake: bool


def told(kinds: Sequence[JobEventKind], job_id: str, result: bytes | None) -> Iterator[Told]:
    """Yield what happened to the job, with its result at its completion."""
    for kind in kinds:
        yield kind, job_id, result if kind is JobEventKind.COMPLETED else None


class FileState(QueueSteps):
    """A queue whose changes can all be written as a frame, and made by reading one.

    When a look at the clock alone changes a record (it expires), that change waits for the next frame: other processes
    see the same clock, so nothing depends on it.
    """

    def __init__(self, name: str) -> None:
        self._changes = Changes()
        self.table: FileTable = FileTable(self._changes)
        super().__init__(self.table)
        self._name = name
        self._written_seen: dict[str, datetime] = {}

    def see(self, worker_id: str, now: datetime | None) -> None:
        super().see(worker_id, now)
        written = self._written_seen.get(worker_id)
        if now is None or written is None or now - written >= _SEEN_AGAIN:
            self._changes.workers[worker_id] = now

    def pause(self, paused: bool) -> None:
        super().pause(paused)
        self._changes.paused = paused

    def keep_cron(self, row: CronRow) -> None:
        super().keep_cron(row)
        self._changes.crons.add(row.name)

    # Changes made here

    @property
    def changed(self) -> bool:
        """Whether there is anything to write."""
        return bool(self._changes)

    def step(self) -> JournalStep:
        """Return what has changed since `written` was last called."""
        changes = self._changes
        events: list[Told] = []
        entries: list[Entry] = []
        blobs: list[bytes] = []
        for job_id, kinds in changes.jobs.items():
            events += told(kinds, job_id, changes.results.get(job_id))
            self._describe(job_id, kinds, job_id in changes.added, entries, blobs)
        entries += self._learned(changes)
        for worker_id, at in changes.workers.items():
            entries.append(worker_entry(worker_id, at))
        entries += [key_entry(key, self.table.current_holder(key)) for key in changes.keys]
        entries += [shortened_entry(*one) for one in changes.met if self.table.waits_for(one[0])]
        if changes.paused is not None:
            entries.append(pause_entry(changes.paused))
        if changes.crons or changes.limits or changes.buckets:
            entries += self._standing(changes.crons, changes.limits, changes.buckets)
        return JournalStep(entries=entries, blobs=blobs, events=events, wake=changes.wake)

    def _learned(self, changes: Changes) -> Iterator[Entry]:
        """Yield how those ended that jobs came after, unless it is in the description of the job."""
        for job_id, dependency in changes.met:
            if job_id not in changes.added and self.table.get(job_id) is not None:
                yield outcome_entry(job_id, dependency, self.table.outcomes(job_id)[dependency])

    def _standing(self, crons: Iterable[str], limits: Iterable[str], buckets: Iterable[str]) -> Iterator[Entry]:
        """Yield what is known of these crons, limits and buckets of keys."""
        kept = self.table.limits
        yield from (cron_entry(self.cron_rows[name]) for name in crons)
        yield from (limit_entry(name, kept.declared.get(name)) for name in limits)
        yield from (bucket_entry(key, kept.full_at(key)) for key in buckets)

    def written(self) -> None:
        """Forget the changes that `step` returned: they are on their way into the journal."""
        for worker_id, at in self._changes.workers.items():
            self._note_written(worker_id, at)
        self._changes.clear()

    def _describe(
        self, job_id: str, kinds: list[JobEventKind], added: bool, entries: list[Entry], blobs: list[bytes]
    ) -> None:
        job = self.table.get(job_id)
        if job is None:
            result = self._changes.results.get(job_id)
            entries.append(gone_entry(job_id, kinds, result))
            return
        entry, its_blobs = job_entry(job, self.table.kept_until(job_id), kinds, added=added)
        entries.append(entry)
        blobs += its_blobs
        if added and job.state is JobState.WAITING:
            entries.append(wait_entry(job, self.table.left(job_id)))
        if added:
            entries += [outcome_entry(job_id, one, outcome) for one, outcome in self.table.outcomes(job_id).items()]

    def snapshot(self) -> Iterator[tuple[list[Entry], list[bytes]]]:
        """Yield the whole state, as the entries and blobs of the frames of a journal."""
        jobs = self.table.everyone()
        limits = self.table.limits
        workers = [worker_entry(worker_id, at) for worker_id, at in self.seen.items()]
        yield [queue_entry(self._name), pause_entry(self.paused), *workers], []
        for start in range(0, len(jobs), _SNAPSHOT_JOBS):
            entries: list[Entry] = []
            blobs: list[bytes] = []
            for job in jobs[start : start + _SNAPSHOT_JOBS]:
                self._describe(job.new.id, [], True, entries, blobs)
            yield entries, blobs
        holders = self.table.every_holder()
        if holders:
            yield [key_entry(key, holder) for key, holder in holders], []
        standing = list(self._standing(self.cron_rows, limits.declared, limits.buckets()))
        if standing:
            yield standing, []

    # Changes made elsewhere

    def apply(self, changes: list[Change]) -> JournalStep:
        """Apply the changes to the state, and return what is to be announced.

        Raises:
            BadEntry: a change is about an unknown job, or another queue. Those before it have been applied.
        """
        events: list[Told] = []
        for change in changes:
            self._apply(change)
            if isinstance(change, JobChanged | JobGone):
                events += told(change.events, change.id, change.told)
        wake, self._changes.wake = self._changes.wake, False
        return JournalStep(entries=[], blobs=[], events=events, wake=wake)

    def _apply(self, change: Change) -> None:
        match change:
            case JobChanged():
                known = self.table.get(change.id)
                new = change.new or (known.new if known else None)
                if new is None:
                    raise BadEntry(f"a change of an unknown job {change.id!r}")
                self.table.restore(change.job(new), change.kept_until, anew=change.new is not None)
            case JobGone():
                self.table.forget(change.id)
            case WorkerSeen():
                self._note_seen(change.id, change.at)
            case WaitBegun() | WaitShortened() | OutcomeLearned():
                self._note_wait(change)
            case CronReplaced() | LimitDeclared() | BucketChanged():
                self._note_standing(change)
            case KeyGiven():
                self.table.restore_holder(change.key, change.holder)
            case Paused():
                self._note_paused(change.paused)
            case QueueNamed():
                self._check_name(change.queue)

    def _note_standing(self, change: CronReplaced | LimitDeclared | BucketChanged) -> None:
        match change:
            case CronReplaced():
                super().keep_cron(change.row)
            case LimitDeclared():
                self.table.restore_limit(change.name, change.limit)
            case BucketChanged():
                self.table.restore_bucket(change.key, change.full_at)

    def _check_name(self, queue: str) -> None:
        if queue != self._name:
            raise BadEntry(f"it is the journal of queue {queue!r}")

    def _note_wait(self, change: WaitBegun | WaitShortened | OutcomeLearned) -> None:
        if isinstance(change, WaitShortened):
            self.table.shorten_wait(change.id, change.dependency)
        elif self.table.get(change.id) is None:
            raise BadEntry(f"an unknown job {change.id!r} that waits")
        elif isinstance(change, OutcomeLearned):
            self.table.restore_outcome(change.id, change.dependency, change.outcome)
        else:
            self.table.restore_wait(change.id, change.after_failure, change.left)

    def _note_seen(self, worker_id: str, at: datetime | None) -> None:
        self._note_written(worker_id, at)
        if at is None:
            self.seen.pop(worker_id, None)
        else:
            self.seen[worker_id] = max(at, self.seen.get(worker_id, at))

    def _note_written(self, worker_id: str, at: datetime | None) -> None:
        if at is None:
            self._written_seen.pop(worker_id, None)
        else:
            self._written_seen[worker_id] = at

    def _note_paused(self, paused: bool) -> None:
        self.paused = paused
        if not paused:
            self._changes.wake = True
