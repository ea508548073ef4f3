"""The lines that the jobs of an in-memory queue wait in, and the holding keys that keep them back.

A waiting job is in exactly one line: `ready` (one per name, by priority and time), `delayed` (by due time), or `parked`
(its key is closed). All methods are synchronous: one call is one atomic step of the event loop.

A key (`workers.limits`) is closed while none of its jobs may start. They are parked as they come up in a claim. When
it opens, the first of each name returns to its ready line, and no other job has to move; the next follows when that one
has started. A key that tokens open is noted in `limits` by the time at which it does.

A fair key never closes. Of each name the first of its jobs stands in the ready line, the front, and the others are
parked at once. When the front is claimed the next becomes the front, and is `moved_back` to where a job would stand
that was enqueued just now: so it comes after one job of every other key. A more urgent job becomes the front instead,
or it would wait for all that come before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sized
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Protocol, TypeAlias

from workers.jobs import ErrorInfo, JobEventKind, JobOutcome, JobState, NewJob
from workers.limits import FAIR_MARK, QUEUE_KEY, RESERVED, WHOLE_QUEUE, Limit, limit_key_of
from workers.storage.base import ANY_NAME
from workers.storage.memory.line import KeyTable, Line, is_over

WHEN_ONE_ENDS: Final = datetime.max.replace(tzinfo=UTC)
"""Until when a key is closed of which as many jobs run as may at once."""


class MemoryLimits:
    """The limits of a queue, how many jobs run of each key, and the buckets, by when they are full again."""

    def __init__(self, processing: Sized, on_bucket: Callable[[str], None]) -> None:
        """Make the limits of a queue with these running jobs.

        `on_bucket` is told of each key whose bucket changes, or is forgotten.
        """
        self.declared: dict[str, Limit] = {}
        self._processing = processing
        self._on_bucket = on_bucket
        self._running: dict[str, int] = {}
        self._full: Line[tuple[datetime]] = Line()
        self._opening: Line[tuple[datetime]] = Line()
        self._looked_at = datetime.min.replace(tzinfo=UTC)

    def limit_of(self, key: str) -> Limit | None:
        """Return the limit that the key belongs to; None for other keys, and for a limit that nobody declared."""
        own = limit_key_of(key)
        return None if own is None else self.declared.get(own.limit)

    def busy(self, key: str) -> bool:
        """Tell whether the key is closed until a job of it ends."""
        if not key.startswith(RESERVED):
            return key in self._running
        limit = self.limit_of(key)
        if limit is None or limit.concurrency is None:
            return False
        running = len(self._processing) if key == QUEUE_KEY else self._running.get(key, 0)
        return running >= limit.concurrency

    def queue_closed_until(self, now: datetime) -> datetime | None:
        """Return until when no job at all starts, None if jobs may."""
        return self.closed_until(QUEUE_KEY, now) if WHOLE_QUEUE in self.declared else None

    def closed_until(self, key: str, now: datetime) -> datetime | None:
        """Return until when no job of the key may start, None if one may."""
        if self.busy(key):
            return WHEN_ONE_ENDS
        limit = self.limit_of(key)
        if limit is None:
            return None
        full_at = self.full_at(key)
        known = limit.known(full_at, now)
        if known is not None and known != full_at:
            self._fill(key, known)
        return limit.opens_at(known, now)

    def full_at(self, key: str) -> datetime | None:
        """Return when the key's bucket is full again; None for one that is full, as nothing is kept of it."""
        full_at = self._full.key(key)
        return None if full_at is None else full_at[0]

    def began(self, key: str) -> None:
        self._running[key] = self._running.get(key, 0) + 1

    def ended(self, key: str) -> None:
        left = self._running.get(key, 0) - 1
        if left > 0:
            self._running[key] = left
        else:
            self._running.pop(key, None)

    def take_token(self, key: str, now: datetime) -> None:
        """Take a token from the key's bucket, if it has one."""
        limit = self.limit_of(key)
        full_at = None if limit is None else limit.taken(self.full_at(key), now)
        if full_at is not None:
            self._fill(key, full_at)

    def _fill(self, key: str, full_at: datetime) -> None:
        self._full.add((full_at,), key)
        self._on_bucket(key)

    def restore_bucket(self, key: str, full_at: datetime | None) -> None:
        """Set when the bucket is full, None for now, as it was written elsewhere."""
        if full_at is None:
            self._full.discard(key)
        else:
            self._full.add((full_at,), key)

    def buckets(self) -> list[str]:
        """Return the key of every bucket that is not full."""
        return self._full.members()

    def open_later(self, key: str, until: datetime) -> None:
        """Note that jobs of the key are parked until then."""
        if until is not WHEN_ONE_ENDS:
            self._opening.add((until,), key)

    def next_opening(self) -> datetime | None:
        """Return when the first key opens that has parked jobs."""
        head = self._opening.head()
        return None if head is None else head[0][0]

    def opened(self, now: datetime) -> Iterator[str]:
        """Yield, once, the keys that have opened by `now`; all of them if the clock was set back."""
        went_back, self._looked_at = now < self._looked_at, now
        keys = self._opening.members() if went_back else []
        while not went_back and (head := self._opening.head()) is not None and is_over(head[0], now):
            keys.append(self._opening.pop()[1])
        for key in keys:
            self._opening.discard(key)
        yield from keys

    def sweep(self, now: datetime) -> Iterator[str]:
        """Forget the buckets that are full, and yield the key of each."""
        while (head := self._full.head()) is not None and is_over(head[0], now):
            key = self._full.pop()[1]
            self._on_bucket(key)
            yield key

    def declare(self, limits: Mapping[str, Limit]) -> list[str]:
        """Keep the limits whose version is no lower than that of the one kept; return their names."""
        newer = {
            name: limit
            for name, limit in limits.items()
            if name not in self.declared or limit.version >= self.declared[name].version
        }
        changed = [name for name, limit in newer.items() if self.declared.get(name) != limit]
        self.declared.update(newer)
        return changed


def is_of(key: str, name: str) -> bool:
    """Tell whether the key belongs to the limit of that name."""
    own = limit_key_of(key)
    return own is not None and own.limit == name


Place: TypeAlias = tuple[int, datetime, int]


class Publisher(Protocol):
    """The receiver of what happens to the jobs."""

    def publish(self, kind: JobEventKind, job_id: str, result: bytes | None = None) -> None:
        """Announce what has just happened; `result` travels with it."""


@dataclass(slots=True, kw_only=True)
class StoredJob:
    """One generation of a job; `run_at` and `serial` are its place among jobs of one priority.

    `moved_back` stands for these two in the ready line, where the job became the front of its key when another started.
    `failures` is a text of `workers.storage.failures`. `outcomes` tells how those ended that the job came after, see
    `KnowsDependencies.outcomes`.
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
    outcomes: dict[str, JobOutcome | None] | None = None
    moved_back: tuple[datetime, int] | None = None
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
        """Where the job stands among all that are ready."""
        at, serial = (self.run_at, self.serial) if self.moved_back is None else self.moved_back
        return (self.new.priority, at, serial)

    @property
    def order(self) -> Place:
        """Where the job stands among those of its key that are parked."""
        return (self.new.priority, self.run_at, self.serial)


class LineTable(KeyTable):
    """Jobs by id and by state, and the lines of those that wait.

    `on_claimable` is called when a job, or the time until the next one, may have become claimable.
    """

    def __init__(self, on_claimable: Callable[[], None]) -> None:
        super().__init__()
        self.by_state: dict[JobState, dict[str, StoredJob]] = {state: {} for state in JobState}
        self._jobs: dict[str, StoredJob] = {}
        self.on_claimable = on_claimable
        self._next_serial = 0
        self.limits = MemoryLimits(self.by_state[JobState.PROCESSING], self.bucket_changed)
        self._ready: dict[str, Line[Place]] = {}
        self._parked: dict[str, dict[str, Line[Place]]] = {}
        self._fronts: dict[tuple[str, str], str] = {}  # by fair key and name
        self._delayed: Line[tuple[datetime]] = Line()

    def claimable(self, names: Collection[str]) -> bool:
        """Tell whether a job for these names is ready. Its key may be closed, though."""
        if ANY_NAME in names:
            return bool(self._ready)
        return any(name in self._ready for name in names)

    def next_due(self) -> datetime | None:
        """Return when the first delayed job comes due, or the first key opens that has parked jobs."""
        head, opening = self._delayed.head(), self.limits.next_opening()
        due = None if head is None else head[0][0]
        return due if opening is None else opening if due is None else min(due, opening)

    def changed(self, job_id: str) -> None:
        """Note a change that is no event, unless the passing of time alone made it."""

    def bucket_changed(self, key: str) -> None:
        """Note that the key's bucket has changed, or was full and is forgotten."""

    def limit_changed(self, name: str) -> None:
        """Note that the limit of that name is another one, or gone."""

    def declare_limits(self, limits: Mapping[str, Limit]) -> None:
        """Keep the limits that are no older than those kept, and let the parked jobs of their keys come up."""
        for name in self.limits.declare(limits):
            self.limit_changed(name)
            self._look_again(name)

    def remove_limit(self, name: str) -> bool:
        """Forget the limit, and let the parked jobs of its keys come up; tell whether there was one."""
        if self.limits.declared.pop(name, None) is None:
            return False
        self.limit_changed(name)
        self._look_again(name)
        return True

    def _look_again(self, name: str) -> None:
        """Let jobs come up, now that the limit of that name is another one."""
        for key in [key for key in self._parked if is_of(key, name)]:
            self._unpark(key)
        if name == WHOLE_QUEUE:
            self.on_claimable()

    def _wanted(self, names: Collection[str]) -> Collection[str]:
        return self._ready if ANY_NAME in names else [name for name in names if name in self._ready]

    def _is_closed(self, key: str, closed: set[str], now: datetime) -> bool:
        """Tell whether no job of the key may start; `closed` has the keys that this claim found so, and keeps them."""
        if key in closed:
            return True
        until = self.limits.closed_until(key, now)
        if until is None:
            return False
        self.limits.open_later(key, until)
        closed.add(key)
        return True

    def _let_next_pass(self, job: StoredJob, key: str, now: datetime) -> None:
        """Let the next parked job come up, now that this one of its key starts."""
        lines = self._parked.get(key)
        if lines is None:
            return
        if key.startswith(FAIR_MARK):
            if (line := lines.get(job.new.name)) is not None:
                self._bring_forward(self._first_of(line), key, now)
        elif (closed := self.limits.closed_until(key, now)) is None:
            self._unpark(key)
        else:
            self.limits.open_later(key, closed)

    def _bring_forward(self, job: StoredJob, key: str, now: datetime) -> None:
        """Make the parked job the front of its fair key: behind all that are ready, or where it stood before."""
        self._step_out(job)
        if job.moved_back is None:
            job.moved_back = (max(job.run_at, now), self._next_serial)
            self._next_serial += 1
            self.changed(job.new.id)
        self._line_up(job)

    def _unpark(self, key: str) -> None:
        """Let the first job of each name come up, unless the key stays closed until another one ends."""
        if key not in self._parked or self.limits.busy(key):
            return
        for name, line in list(self._parked[key].items()):
            if (key, name) not in self._fronts:
                job = self._first_of(line)
                self._step_out(job)
                self._line_up(job)

    def _first_of(self, line: Line[Place]) -> StoredJob:
        head = line.head()
        assert head is not None, "empty lines are closed"
        return self._jobs[head[1]]

    def _line_up(self, job: StoredJob) -> None:
        if job.state is not JobState.QUEUED:
            job.moved_back = None
            self._delayed.add((job.run_at,), job.new.id)
            if self.next_due() == job.run_at:
                self.on_claimable()
            return
        key = job.new.holding_key
        if key is not None and key.startswith(FAIR_MARK) and not self._comes_to_front(job, key):
            self._park(job, key)
            return
        self._stand(job, self._ready, job.place)
        self.on_claimable()

    def _comes_to_front(self, job: StoredJob, key: str) -> bool:
        """Tell whether the job is the front of its fair key from now on; the one behind it that was is parked."""
        front = self._fronts.get((key, job.new.name))
        if front is not None:
            other = self._jobs[front]
            if other.order < job.order:
                return False
            self._step_out(other)
            self._park(other, key)
        self._fronts[key, job.new.name] = job.new.id
        return True

    def _park(self, job: StoredJob, key: str) -> None:
        self._stand(job, self._parked.setdefault(key, {}), job.order)

    def _stand(self, job: StoredJob, lines: dict[str, Line[Place]], place: Place) -> None:
        job.line = lines.get(job.new.name)
        if job.line is None:
            job.line = lines[job.new.name] = Line()
        job.line.add(place, job.new.id)

    def _step_out(self, job: StoredJob) -> None:
        if job.line is None:
            return
        job.line.discard(job.new.id)
        if not job.line:
            self._close(job, job.line)
        job.line = None
        if self._fronts and (key := job.new.holding_key) is not None:
            front = (key, job.new.name)
            if self._fronts.get(front) == job.new.id:
                del self._fronts[front]

    def _close(self, job: StoredJob, line: Line[Place]) -> None:
        """Delete the line when it is empty, so that names and keys that come and go take no memory."""
        name, key = job.new.name, job.new.holding_key
        if self._ready.get(name) is line:
            del self._ready[name]
        elif key is not None:
            lines = self._parked[key]
            del lines[name]
            if not lines:
                del self._parked[key]
