"""The lines that the jobs of an in-memory queue wait in, and the gates that keep them back.

A waiting job is in exactly one line: `ready` (one per name, by priority and time), `delayed` (by due time), or `parked`
(its gate is closed). All methods are synchronous: one call is one atomic step of the event loop.

A gate (`workers.limits`) may be closed. Its jobs are parked as they come up in a claim. When it opens, the first of each
name returns to its ready line, and no other job has to move; the next follows when that one has passed. A gate that
tokens open is noted in `gates` by the time at which it does.

A fair key is a gate that never closes. Of each name the first of its jobs stands in the ready line, the front, and the
others are parked at once. When the front is claimed the next becomes the front, and its `turn` is the place of a job
that was enqueued just now: so it comes after one job of every other key. A more urgent job takes its place,
or it would wait for all that come before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sized
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Protocol, TypeAlias

from workers.limits import FAIR_MARK, QUEUE_GATE, RESERVED, WHOLE_QUEUE, Limit, LimitKey, limit_key_of
from workers.jobs import ErrorInfo, JobEventKind, JobOutcome, JobState, NewJob
from workers.storage.base import ANY_NAME
from workers.storage.memory.line import KeyTable, Line, is_over

WHEN_ONE_ENDS: Final = datetime.max.replace(tzinfo=UTC)
"""The time at which a gate opens that as many jobs have passed as may run at once."""


class Gates:
    """The limits of a queue, how many jobs run of each gate, and the buckets, by when they are full again."""

    def __init__(self, processing: Sized, on_bucket: Callable[[str], None]) -> None:
        """Make the gates of a queue with these running jobs.

        `on_bucket` is told of each gate whose bucket changes, or is forgotten.
        """
        self.limits: dict[str, Limit] = {}
        self._processing = processing
        self._on_bucket = on_bucket
        self._running: dict[str, int] = {}
        self._full: Line[tuple[datetime]] = Line()
        self._opening: Line[tuple[datetime]] = Line()
        self._looked_at = datetime.min.replace(tzinfo=UTC)

    def limit_of(self, gate: str) -> Limit | None:
        """Return the limit that the gate belongs to; None for other gates, and for a limit that nobody declared."""
        if not gate.startswith(RESERVED):
            return None
        if gate == QUEUE_GATE:
            return self.limits.get(WHOLE_QUEUE)
        key = limit_key_of(gate)
        return None if key is None else self.limits.get(key.limit)

    def busy(self, gate: str) -> bool:
        """Tell whether the gate is closed until a job of it ends."""
        if not gate.startswith(RESERVED):
            return gate in self._running
        limit = self.limit_of(gate)
        if limit is None or limit.concurrency is None:
            return False
        running = len(self._processing) if gate == QUEUE_GATE else self._running.get(gate, 0)
        return running >= limit.concurrency

    def queue_closed_until(self, now: datetime) -> datetime | None:
        """Return until when no job at all starts, None if jobs may."""
        return self.closed_until(QUEUE_GATE, now) if WHOLE_QUEUE in self.limits else None

    def closed_until(self, gate: str, now: datetime) -> datetime | None:
        """Return until when no job passes the gate, None if it is open."""
        if self.busy(gate):
            return WHEN_ONE_ENDS
        limit = self.limit_of(gate)
        if limit is None:
            return None
        full_at = self.full_at(gate)
        known = limit.known(full_at, now)
        if known is not None and known != full_at:
            self._fill(gate, known)
        return limit.opens_at(known, now)

    def full_at(self, gate: str) -> datetime | None:
        """Return when the gate's bucket is full again; None for one that is full, as nothing is kept of it."""
        key = self._full.key(gate)
        return None if key is None else key[0]

    def began(self, gate: str) -> None:
        self._running[gate] = self._running.get(gate, 0) + 1

    def ended(self, gate: str) -> None:
        left = self._running.get(gate, 0) - 1
        if left > 0:
            self._running[gate] = left
        else:
            self._running.pop(gate, None)

    def take_token(self, gate: str, now: datetime) -> None:
        """Take a token from the gate's bucket, if it has one."""
        limit = self.limit_of(gate)
        full_at = None if limit is None else limit.taken(self.full_at(gate), now)
        if full_at is not None:
            self._fill(gate, full_at)

    def _fill(self, gate: str, full_at: datetime) -> None:
        self._full.add((full_at,), gate)
        self._on_bucket(gate)

    def restore_bucket(self, gate: str, full_at: datetime | None) -> None:
        """Set when the bucket is full, None for now, as it was written elsewhere."""
        if full_at is None:
            self._full.discard(gate)
        else:
            self._full.add((full_at,), gate)

    def buckets(self) -> list[str]:
        """Return the gate of every bucket that is not full."""
        return self._full.members()

    def open_later(self, gate: str, until: datetime) -> None:
        """Note that jobs are parked at the gate until then."""
        if until is not WHEN_ONE_ENDS:
            self._opening.add((until,), gate)

    def next_opening(self) -> datetime | None:
        """Return when the first gate opens that jobs are parked at."""
        head = self._opening.head()
        return None if head is None else head[0][0]

    def opened(self, now: datetime) -> Iterator[str]:
        """Yield, once, the gates that have opened by `now`; all of them if the clock was set back."""
        went_back, self._looked_at = now < self._looked_at, now
        gates = self._opening.members() if went_back else []
        while not went_back and (head := self._opening.head()) is not None and is_over(head[0], now):
            gates.append(self._opening.pop()[1])
        for gate in gates:
            self._opening.discard(gate)
        yield from gates

    def sweep(self, now: datetime) -> Iterator[str]:
        """Forget the buckets that are full, and yield the gate of each."""
        while (head := self._full.head()) is not None and is_over(head[0], now):
            gate = self._full.pop()[1]
            self._on_bucket(gate)
            yield gate

    def declare(self, limits: Mapping[str, Limit]) -> list[str]:
        """Keep the limits whose version is no lower than that of the one kept; return their names."""
        newer = {
            name: limit
            for name, limit in limits.items()
            if name not in self.limits or limit.version >= self.limits[name].version
        }
        changed = [name for name, limit in newer.items() if self.limits.get(name) != limit]
        self.limits.update(newer)
        return changed


def is_of(gate: str, name: str) -> bool:
    """Tell whether the gate belongs to the limit of that name."""
    key: LimitKey | None = limit_key_of(gate)
    return key is not None and key.limit == name


Place: TypeAlias = tuple[int, datetime, int]
Turn: TypeAlias = tuple[datetime, int]


class Publisher(Protocol):
    """The receiver of what happens to the jobs."""

    def publish(self, kind: JobEventKind, job_id: str, result: bytes | None = None) -> None:
        """Announce what has just happened; `result` travels with it."""


@dataclass(slots=True, kw_only=True)
class StoredJob:
    """One generation of a job; `run_at` and `serial` are its place among jobs of one priority.

    `turn` stands for these two in the ready line, where the job became the front of its fair key when another started.
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
    turn: Turn | None = None
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
        at, serial = (self.run_at, self.serial) if self.turn is None else self.turn
        return (self.new.priority, at, serial)

    @property
    def order(self) -> Place:
        """Where the job stands among those parked at its gate."""
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
        self.gates = Gates(self.by_state[JobState.PROCESSING], self.bucket_changed)
        self._ready: dict[str, Line[Place]] = {}
        self._parked: dict[str, dict[str, Line[Place]]] = {}
        self._fronts: dict[tuple[str, str], str] = {}  # by fair key and name
        self._delayed: Line[tuple[datetime]] = Line()

    def claimable(self, names: Collection[str]) -> bool:
        """Tell whether a job for these names is ready. Its gate may still turn out to be closed."""
        if ANY_NAME in names:
            return bool(self._ready)
        return any(name in self._ready for name in names)

    def next_due(self) -> datetime | None:
        """Return when the first delayed job comes due, or the first gate opens that jobs are parked at."""
        head, opening = self._delayed.head(), self.gates.next_opening()
        due = None if head is None else head[0][0]
        return due if opening is None else opening if due is None else min(due, opening)

    def changed(self, job_id: str) -> None:
        """Note a change that is no event, unless the passing of time alone made it."""

    def bucket_changed(self, gate: str) -> None:
        """Note that the gate's bucket has changed, or was full and is forgotten."""

    def limit_changed(self, name: str) -> None:
        """Note that the limit of that name is another one, or gone."""

    def declare_limits(self, limits: Mapping[str, Limit]) -> None:
        """Keep the limits that are no older than those kept, and let the jobs parked at their gates come up."""
        for name in self.gates.declare(limits):
            self.limit_changed(name)
            self._look_again(name)

    def remove_limit(self, name: str) -> bool:
        """Forget the limit, and let the jobs parked at its gates come up; tell whether there was one."""
        if self.gates.limits.pop(name, None) is None:
            return False
        self.limit_changed(name)
        self._look_again(name)
        return True

    def _look_again(self, name: str) -> None:
        """Let jobs come up, now that the limit of that name is another one."""
        for gate in [gate for gate in self._parked if is_of(gate, name)]:
            self._unpark(gate)
        if name == WHOLE_QUEUE:
            self.on_claimable()

    def _wanted(self, names: Collection[str]) -> Collection[str]:
        return self._ready if ANY_NAME in names else [name for name in names if name in self._ready]

    def _is_closed(self, gate: str, closed: set[str], now: datetime) -> bool:
        """Tell whether no job passes the gate; `closed` has the gates that this claim found so, and keeps them."""
        if gate in closed:
            return True
        until = self.gates.closed_until(gate, now)
        if until is None:
            return False
        self.gates.open_later(gate, until)
        closed.add(gate)
        return True

    def _let_next_pass(self, job: StoredJob, gate: str, now: datetime) -> None:
        """Let the next parked job come up, now that this one has passed the gate."""
        lines = self._parked.get(gate)
        if lines is None:
            return
        if gate.startswith(FAIR_MARK):
            if (line := lines.get(job.new.name)) is not None:
                self._bring_forward(self._first_of(line), gate, now)
        elif (closed := self.gates.closed_until(gate, now)) is None:
            self._unpark(gate)
        else:
            self.gates.open_later(gate, closed)

    def _bring_forward(self, job: StoredJob, gate: str, now: datetime) -> None:
        """Make the parked job the front of its fair key: behind all that are ready, or at the turn that it had."""
        self._step_out(job)
        if job.turn is None:
            job.turn = (max(job.run_at, now), self._next_serial)
            self._next_serial += 1
            self.changed(job.new.id)
        self._line_up(job)

    def _unpark(self, gate: str) -> None:
        """Let the first job of each name come up, unless the gate stays closed until another one ends."""
        if gate not in self._parked or self.gates.busy(gate):
            return
        for name, line in list(self._parked[gate].items()):
            if (gate, name) not in self._fronts:
                job = self._first_of(line)
                self._step_out(job)
                self._line_up(job)

    def _first_of(self, line: Line[Place]) -> StoredJob:
        head = line.head()
        assert head is not None, "empty lines are closed"
        return self._jobs[head[1]]

    def _line_up(self, job: StoredJob) -> None:
        if job.state is not JobState.QUEUED:
            job.turn = None
            self._delayed.add((job.run_at,), job.new.id)
            if self.next_due() == job.run_at:
                self.on_claimable()
            return
        gate = job.new.gate
        if gate is not None and gate.startswith(FAIR_MARK) and not self._comes_to_front(job, gate):
            self._park(job, gate)
            return
        self._stand(job, self._ready, job.place)
        self.on_claimable()

    def _comes_to_front(self, job: StoredJob, gate: str) -> bool:
        """Tell whether the job is the front of its fair key from now on; the one behind it that was is parked."""
        front = self._fronts.get((gate, job.new.name))
        if front is not None:
            other = self._jobs[front]
            if other.order < job.order:
                return False
            self._step_out(other)
            self._park(other, gate)
        self._fronts[gate, job.new.name] = job.new.id
        return True

    def _park(self, job: StoredJob, gate: str) -> None:
        self._stand(job, self._parked.setdefault(gate, {}), job.order)

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
        if self._fronts and (gate := job.new.gate) is not None:
            turn = (gate, job.new.name)
            if self._fronts.get(turn) == job.new.id:
                del self._fronts[turn]

    def _close(self, job: StoredJob, line: Line[Place]) -> None:
        """Delete the line when it is empty, so that names and gates that come and go take no memory."""
        name, gate = job.new.name, job.new.gate
        if self._ready.get(name) is line:
            del self._ready[name]
        elif gate is not None:
            lines = self._parked[gate]
            del lines[name]
            if not lines:
                del self._parked[gate]
