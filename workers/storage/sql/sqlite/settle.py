"""Settlements: how attempts end.

Theory of operation. The rows of all settled claims are read first. Each settlement is decided on its own and only noted
in a `_Writes`, which then writes one statement per kind of ending. An element that cannot be stored gets an outcome and
raises no exception, so it does not fail its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from sqlalchemy import text

from workers.jobs import (
    Cancelled,
    Completed,
    Continued,
    ErrorInfo,
    Failed,
    JobEventKind,
    NewJob,
    Retention,
    Retried,
    Settlement,
    SettleOutcome,
    SettleStatus,
)
from workers.retention import told_with_the_end
from workers.storage.rules import count_retry
from workers.storage.sql.rows import (
    RowState,
    Transaction,
    batches,
    decode_retention,
    decode_token,
    duration,
    encode_error,
    encode_retention,
    expanding,
    next_seq,
)
from workers.storage.sql.sqlite.enqueue import add, fields
from workers.storage.sql.steps.dependents import insert, tell_end
from workers.storage.sql.steps.ends import delete, note_failures, outcomes_by_id, unhold
from workers.storage.subscribers import Told

Values: TypeAlias = dict[str, int | str | bytes | None]

MAX_RESULT_BYTES: Final = 900_000_000
"""Below SQLite's limit of 1 000 000 000 bytes for a row."""

_APPLIED: Final = SettleOutcome(status=SettleStatus.APPLIED)
_ALREADY_APPLIED: Final = SettleOutcome(status=SettleStatus.ALREADY_APPLIED)

# `+queue` keeps the planner from an index on the queue alone; it is to use the row numbers.
_ROWS = expanding(
    "SELECT seq, id, state, token, attempts, max_attempts, uncounted, keep_completed, keep_failed, ordering_key,"
    " dependents, error IS NOT NULL AS failed"
    " FROM workers_jobs WHERE seq IN :seqs AND +queue = :queue",
    "seqs",
)
_RESULT = text("UPDATE workers_payloads SET data = :data WHERE seq = :seq")
_FINISH = text(
    "UPDATE workers_jobs SET state = :state, worker = NULL, lease_until = NULL, cancel_requested = 0,"
    " finished_at = :now, expires_at = :expires_at, error = coalesce(:error, error) WHERE seq = :seq"
)
_WAIT_AGAIN = text(
    "UPDATE workers_jobs SET state = :state, worker = NULL, lease_until = NULL, cancel_requested = 0,"
    " attempts = :attempts, uncounted = :uncounted, run_at = coalesce(:run_at, run_at),"
    " error = coalesce(:error, error) WHERE seq = :seq"
)
# The new number puts it behind everything that is there.
_GO_ON = text(
    "UPDATE workers_jobs SET seq = :next, name = :name, state = :state, priority = :priority, run_at = :run_at,"
    " attempts = 0, max_attempts = :max_attempts, stalls = 0, uncounted = 0, cancel_requested = 0,"
    " keep_completed = :keep_completed, keep_failed = :keep_failed, ordering_key = :ordering_key, backoff = :backoff,"
    " chain_index = :chain_index, meta = :meta, worker = NULL, lease_until = NULL, error = NULL, failures = NULL"
    " WHERE seq = :seq"
)
_GO_ON_WITH = text("UPDATE workers_payloads SET seq = :next, data = :data WHERE seq = :seq")


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """The row of a claimed job, kept up to date as its settlements are decided."""

    seq: int
    id: str
    state: str
    token: bytes | None
    attempts: int
    max_attempts: int
    uncounted: int
    keep_completed: int | None
    keep_failed: int | None
    ordering_key: str | None
    dependents: int
    failed: int


@dataclass(slots=True)
class _Writes:
    """What the settlements decided so far are going to write."""

    now: int
    results: list[Values] = field(default_factory=list)
    finished: list[Values] = field(default_factory=list)
    waiting: list[Values] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    ended_unseen: list[tuple[str, RowState, str | None]] = field(default_factory=list)
    ends: bool = False
    freed_keys: list[str | None] = field(default_factory=list)
    continued: list[tuple[int, NewJob]] = field(default_factory=list)
    continuations: list[NewJob] = field(default_factory=list)
    events: list[Told] = field(default_factory=list)

    def apply(self, attempt: _Attempt, settlement: Settlement) -> None:
        """Note the settlement of an attempt that holds its job."""
        self.freed_keys.append(attempt.ordering_key)
        match settlement:
            case Completed():
                self._complete(attempt, settlement)
            case Continued():
                self._continue(attempt, settlement.then)
            case Retried():
                self._retry(attempt, settlement)
            case Failed():
                self._fail(attempt, settlement.error, settlement.keep)
            case Cancelled():
                keep = attempt.keep_failed if settlement.keep is None else encode_retention(settlement.keep)
                self._finish(attempt, RowState.CANCELLED, JobEventKind.CANCELLED, keep, None)
            case _:
                self._wait(attempt, JobEventKind.QUEUED, attempts=attempt.attempts - 1, uncounted=attempt.uncounted)

    def _complete(self, attempt: _Attempt, settlement: Completed) -> None:
        keep = attempt.keep_completed if settlement.keep is None else encode_retention(settlement.keep)
        if keep is not None or attempt.dependents:
            self.results.append({"seq": attempt.seq, "data": settlement.result})
        told = told_with_the_end(settlement.result, decode_retention(keep))
        self._finish(attempt, RowState.COMPLETED, JobEventKind.COMPLETED, keep, None, told)
        if settlement.then is not None:
            self.continuations.append(settlement.then)

    def _continue(self, attempt: _Attempt, then: NewJob) -> None:
        attempt.state = RowState.SCHEDULED if then.delay else RowState.READY
        self.events.append((JobEventKind.QUEUED, attempt.id, None))
        self.continued.append((attempt.seq, then))

    def _fail(self, attempt: _Attempt, error: ErrorInfo, keep: Retention | None) -> None:
        kept = attempt.keep_failed if keep is None else encode_retention(keep)
        self._finish(attempt, RowState.FAILED, JobEventKind.FAILED, kept, encode_error(error))

    def _retry(self, attempt: _Attempt, settlement: Retried) -> None:
        counted, uncounted = count_retry(settlement, attempt.uncounted)
        if counted and not settlement.counted and attempt.attempts >= attempt.max_attempts:
            self._fail(attempt, replace(settlement.error, exhausted=True), None)
            return
        self._wait(
            attempt,
            JobEventKind.QUEUED if settlement.snoozed else JobEventKind.FAILING,
            attempts=attempt.attempts if counted else attempt.attempts - 1,
            uncounted=uncounted,
            delay=duration(settlement.delay),
            error=None if settlement.snoozed else encode_error(settlement.error),
        )

    def _finish(
        self,
        attempt: _Attempt,
        state: RowState,
        kind: JobEventKind,
        keep: int | None,
        error: str | None,
        told: bytes | None = None,
    ) -> None:
        attempt.state = state
        self.events.append((kind, attempt.id, told))
        self.ends = self.ends or bool(attempt.dependents)
        if keep is None:
            if attempt.dependents:
                self.ended_unseen.append((attempt.id, state, error))
            attempt.token = None
            self.dropped.append(attempt.seq)
            return
        self.finished.append(
            {
                "seq": attempt.seq,
                "state": state.value,
                "now": self.now,
                "expires_at": self.now + keep,
                "error": error,
            }
        )

    def _wait(
        self,
        attempt: _Attempt,
        kind: JobEventKind,
        *,
        attempts: int,
        uncounted: int,
        delay: int | None = None,
        error: str | None = None,
    ) -> None:
        """Let the job run again after `delay`; None: at once, in its old place."""
        later = RowState.FAILING if error is not None or attempt.failed else RowState.SCHEDULED
        attempt.state = later if delay else RowState.READY
        self.events.append((kind, attempt.id, None))
        self.waiting.append(
            {
                "seq": attempt.seq,
                "state": attempt.state,
                "attempts": attempts,
                "uncounted": uncounted,
                "run_at": None if delay is None else self.now + delay,
                "error": error,
            }
        )

    def write(self, transaction: Transaction) -> None:
        """Write everything noted to the tables."""
        connection = transaction.connection
        for statement, rows in ((_RESULT, self.results), (_FINISH, self.finished), (_WAIT_AGAIN, self.waiting)):
            if rows:
                connection.execute(statement, rows)
        self._go_on(transaction)
        insert(transaction, [then for _, then in self.continued])
        transaction.ends = transaction.ends or self.ends
        for ended in self.ended_unseen:
            tell_end(transaction, *ended)
        delete(transaction, self.dropped)
        unhold(transaction, self.freed_keys)
        transaction.events += self.events
        transaction.wake = transaction.wake or bool(self.waiting or self.continued)
        add(transaction, self.continuations)

    def _go_on(self, transaction: Transaction) -> None:
        if not self.continued:
            return
        numbered = list(enumerate(self.continued, next_seq(transaction)))
        rows = [{"next": number, "seq": seq, **fields(transaction, then)} for number, (seq, then) in numbered]
        transaction.connection.execute(_GO_ON, rows)
        payloads = [{"next": number, "seq": seq, "data": then.payload} for number, (seq, then) in numbered]
        transaction.connection.execute(_GO_ON_WITH, payloads)


def settle(transaction: Transaction, settlements: Sequence[Settlement]) -> list[SettleOutcome]:
    """See `Storage.settle`."""
    note_failures(transaction, settlements)
    tokens = [decode_token(settlement.claim.token) for settlement in settlements]
    attempts: dict[int, _Attempt] = {}
    for batch in batches([seq for seq, _ in tokens]):
        bound = {"queue": transaction.queue, "seqs": list(batch)}
        rows = transaction.connection.execute(_ROWS, bound).mappings()
        attempts.update((row["seq"], _Attempt(**row)) for row in rows)
    work = _Writes(transaction.now)
    outcomes: list[SettleOutcome | None] = []
    for settlement, (seq, secret) in zip(settlements, tokens, strict=True):
        outcomes.append(_decide(work, attempts.get(seq), secret, settlement))
    work.write(transaction)
    unknown = [settlement.claim for settlement, outcome in zip(settlements, outcomes, strict=True) if not outcome]
    others = outcomes_by_id(transaction, unknown) if unknown else {}
    return [
        outcome or others[settlement.claim.token] for settlement, outcome in zip(settlements, outcomes, strict=True)
    ]


def _decide(work: _Writes, attempt: _Attempt | None, secret: bytes, settlement: Settlement) -> SettleOutcome | None:
    """Return the outcome and note its effect in `work`; None for a claim that does not hold its job."""
    if attempt is None or attempt.token != secret or attempt.id != settlement.claim.job_id:
        return None
    if attempt.state != RowState.PROCESSING:
        return _ALREADY_APPLIED
    if fault := _fault(settlement):
        return SettleOutcome(status=SettleStatus.ERROR, detail=fault)
    work.apply(attempt, settlement)
    return _APPLIED


def _fault(settlement: Settlement) -> str | None:
    if isinstance(settlement, Completed) and len(settlement.result) > MAX_RESULT_BYTES:
        return f"the result has {len(settlement.result)} bytes; SQLite holds {MAX_RESULT_BYTES} at most"
    return None
