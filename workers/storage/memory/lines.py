"""The lines that the jobs of an in-memory queue wait in, and the gates that keep them back.

A waiting job is in exactly one line: `ready` (one per name, by priority and time), `delayed` (by due time), or `parked`
(its gate is closed). All methods are synchronous: one call is one atomic step of the event loop.

A gate (`workers.gates`) may be closed. Its jobs are parked as they come up in a claim. When it opens, the first of each
name returns to its ready line, and no other job has to move; the next follows when that one has passed. A gate that
tokens open is noted in `gates` by the time at which it does.

A fair key is a gate that never closes. Of each name the first of its jobs stands in the ready line, the front, and the
others are parked at once. When the front is claimed the next becomes the front, and its `turn` is the place of a job
that was enqueued just now: so it comes after one job of every other key. A more urgent job takes its place,
or it would wait for all that come before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, TypeAlias

from workers.gates import FAIR_MARK, WHOLE_QUEUE, Limit
from workers.jobs import ErrorInfo, JobEventKind, JobOutcome, JobState, NewJob
from workers.storage.base import ANY_NAME
from workers.storage.memory.gates import Gates, is_of
from workers.storage.memory.line import KeyTable, Line

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
