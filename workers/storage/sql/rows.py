"""Job values as columns hold them: times, retentions, errors, tokens; and a transaction with what it will announce."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any, Final, TypeVar

from sqlalchemy import TextClause, bindparam, text

from workers.jobs import (
    DROP,
    MESSAGE_CHARACTERS,
    STACK_CHARACTERS,
    Claim,
    ErrorInfo,
    JobEventKind,
    JobRef,
    JobState,
    Retention,
)
from workers.metadata import decode_meta
from workers.retry import RetryPolicy
from workers.storage.rules import bounded, dependency_error
from workers.storage.sql.direct import Executor
from workers.storage.subscribers import Told

T = TypeVar("T")

BATCH: Final = 500
"""How many values are bound to one statement at most; SQLite's lowest limit is far above."""

_LAST = text("SELECT coalesce(max(seq), 0) FROM workers_jobs")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_PART: Final = r'"((?:[^"\\]|\\u[0-9a-f]{4}|\\[^u])*)'
_BEGINNING: Final = re.compile(r"\[" + _PART + '", ' + _PART)
"""The type of an error and the message, which may be cut, at the beginning of its text."""


class RowState(StrEnum):
    """The values of the `state` column."""

    READY = "ready"
    HELD = "held"
    SCHEDULED = "scheduled"
    WAITING = "waiting"
    FAILING = "failing"
    PROCESSING = "processing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


DELAYED: Final = frozenset({RowState.SCHEDULED, RowState.FAILING})
ENDED: Final = frozenset({RowState.COMPLETED, RowState.FAILED, RowState.CANCELLED})


@dataclass(kw_only=True)
class Transaction:
    """One short transaction on one queue; `events` and `wake` are announced when it has committed."""

    connection: Executor
    queue: int
    clock: Callable[[Executor], int]
    events: list[Told] = field(default_factory=list)
    wake: bool = False
    ends: bool = False
    """Whether jobs may have ended that others follow; on SQLite these are released before the commit."""
    quiet: bool = False
    """Whether it wakes nobody on this queue, because the caller will."""
    lasting: bool = False
    """Whether it is a caller's, who commits at any time: by then, more may have subscribed than now."""
    _elsewhere: dict[int, Transaction] = field(default_factory=dict)

    @cached_property
    def now(self) -> int:
        """The time of the whole transaction, read when first needed, because PostgreSQL's clock costs a query."""
        return self.clock(self.connection)

    @cached_property
    def dialect(self) -> str:
        return self.connection.dialect.name

    def encode(self, text: str) -> str:
        """Return the text as this database holds it."""
        return encode_text(text) if self.dialect == "postgresql" else text

    def decode(self, text: str) -> str:
        """Return the text that `encode` was given."""
        return decode_text(text) if self.dialect == "postgresql" else text

    def announce(self, kind: JobEventKind, ids: Iterable[str]) -> None:
        self.events.extend([(kind, job_id, None) for job_id in ids])

    def on(self, queue: int) -> Transaction:
        """Return the same transaction on another queue, with announcements of its own."""
        if queue == self.queue:
            return self
        if queue not in self._elsewhere:
            self._elsewhere[queue] = Transaction(
                connection=self.connection, queue=queue, clock=self.clock, lasting=self.lasting
            )
        return self._elsewhere[queue]

    def on_all_queues(self) -> Iterator[Transaction]:
        """Yield the transaction on each of its queues."""
        yield self
        yield from self._elsewhere.values()


def next_seq(transaction: Transaction) -> int:
    """Return the number of SQLite's next row.

    It is assigned here, because SQLite cannot report those of a batched INSERT.
    """
    return int(transaction.connection.execute(_LAST).scalar_one()) + 1


def milliseconds(moment: datetime) -> int:
    return (moment - _EPOCH) // _MILLISECOND


def moment(value: int) -> datetime:
    """Return the time that the value stands for; 1970 for a value that only somebody else can have written."""
    try:
        return _EPOCH + value * _MILLISECOND
    except (TypeError, OverflowError):
        return _EPOCH


def optional_moment(value: int | None) -> datetime | None:
    return None if value is None else moment(value)


def duration(value: timedelta) -> int:
    """Return the milliseconds of the bounded duration, rounded up so that nothing happens early."""
    return -(-bounded(value) // _MILLISECOND) if value else 0  # as most delays are


@lru_cache(1_000)  # a queue's jobs have few
def encode_retention(value: Retention) -> int | None:
    return None if value is DROP else duration(value)


def decode_retention(value: int | None) -> Retention:
    return DROP if value is None else value * _MILLISECOND


def encode_error(error: ErrorInfo) -> str:
    # ASCII JSON can hold what UTF-8 cannot: a lone surrogate, as in a message with an undecodable file name.
    return json.dumps(
        [error.type, error.message[:MESSAGE_CHARACTERS], error.stack[-STACK_CHARACTERS:], error.exhausted]
    )


def decode_error(value: str | None) -> ErrorInfo | None:
    if value is None:
        return None
    try:
        found = json.loads(value)
        if isinstance(found, dict):  # made by `workers_release` of PostgreSQL
            return _error_of_dependency(found)
        kind, message, stack, exhausted = found
    except (ValueError, TypeError, KeyError, RecursionError):
        return ErrorInfo(type="CorruptRecord", message="the stored error was changed by somebody else")
    return ErrorInfo(type=str(kind), message=str(message), stack=str(stack), exhausted=bool(exhausted))


def _error_of_dependency(found: Mapping[str, str]) -> ErrorInfo:
    """Return the error for the id of the job that did not complete, how it ended, and the beginning of its error."""
    ended, begun = found["ended"], _BEGINNING.match(found["cause"] or "")
    cause = None
    if begun is not None:
        kind, message = (str(json.loads(f'"{part}"')) for part in begun.groups())
        cause = ErrorInfo(type=kind, message=message)
    job_id, queue = decode_text(str(found["dependency"])), found.get("queue")
    dependency = job_id if queue is None else JobRef(decode_text(queue), job_id)
    return dependency_error(dependency, None if ended == "removed" else JobState(ended), cause)


def encode_backoff(policy: RetryPolicy | None) -> str | None:
    if policy is None:
        return None
    return json.dumps(
        [policy.initial.total_seconds(), policy.multiplier, policy.maximum.total_seconds(), policy.jitter]
    )


def decode_backoff(value: str | None) -> RetryPolicy | None:
    """Return the job's own policy; None if somebody made it unreadable, so that the job still runs."""
    if value is None:
        return None
    try:
        initial, multiplier, maximum, jitter = json.loads(value)
        return RetryPolicy(
            initial=timedelta(seconds=initial), multiplier=multiplier, maximum=timedelta(seconds=maximum), jitter=jitter
        )
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None


def missing_payload(payload: bytes | None) -> ErrorInfo | None:
    """Return why a job may not run whose payload is gone; None if it is there."""
    if payload is not None:
        return None
    return ErrorInfo(type="CorruptRecord", message="its payload is missing from workers_payloads; enqueue it again")


def claim_of(
    row: Any,  # of any types that columns have
    *,
    job_id: str,
    name: str,
    secret: bytes,
    worker_id: str,
    lease: timedelta,
) -> Claim:
    """Return the claim of a job whose row says that it is processing."""
    return Claim(
        job_id=job_id,
        name=name,
        payload=row.payload or b"",
        token=encode_token(row.seq, secret),
        worker_id=worker_id,
        lease=lease,
        attempt=row.attempts,
        max_attempts=row.max_attempts,
        created_at=moment(row.created_at),
        keep_completed=decode_retention(row.keep_completed),
        keep_failed=decode_retention(row.keep_failed),
        priority=row.priority,
        backoff=decode_backoff(row.backoff),
        chain_index=row.chain_index,
        last_error=decode_error(row.error),
        meta=decode_meta(row.meta) if row.meta else {},
        stalled=missing_payload(row.payload),
    )


def encode_text(text: str) -> str:
    """Return the text without NUL, which PostgreSQL's type lacks; different texts stay different."""
    return text.replace("\x01", "\x01\x02").replace("\x00", "\x01\x01") if "\x00" in text or "\x01" in text else text


def decode_text(text: str) -> str:
    """Return the text that `encode_text` was given."""
    return text.replace("\x01\x01", "\x00").replace("\x01\x02", "\x01") if "\x01" in text else text


def encode_token(seq: int, secret: bytes) -> str:
    """Make a token. The row number finds the job without a search; the random part fences."""
    return f"{seq:x}.{secret.hex()}"


def decode_token(token: str) -> tuple[int, bytes]:
    """Return the row number and the random part; (-1, b"") for a token that no claim of ours ever had."""
    seq, _, secret = token.partition(".")
    try:
        value = int(seq, 16)
        return (value, bytes.fromhex(secret)) if 0 <= value < 1 << 63 else (-1, b"")
    except ValueError:
        return -1, b""


def public_state(state: str, run_at: int, now: int) -> JobState:
    """Return the state as others see it.

    A delayed job that is due counts as queued, although no step has moved it yet.
    """
    if state in (RowState.READY, RowState.HELD) or (state in DELAYED and run_at <= now):
        return JobState.QUEUED
    return JobState(state)


def expanding(statement: str, name: str) -> TextClause:
    """Make a statement whose parameter `name` is a list."""
    return text(statement).bindparams(bindparam(name, expanding=True))


def locking(statement: str, lock: str, *, lists: str | None = None) -> Mapping[str, TextClause]:
    """Make the statement for each dialect.

    On PostgreSQL, where writers run side by side, it locks the rows it finds.
    """
    make = (lambda whole: expanding(whole, lists)) if lists else text
    return {"sqlite": make(statement), "postgresql": make(f"{statement} FOR UPDATE{lock}")}


WAIT: Final = ""
"""For `locking`: wait for rows that another transaction has locked."""

SKIP: Final = " SKIP LOCKED"
"""For `locking`: skip rows that another transaction has locked."""


def batches(values: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(values), BATCH):
        yield values[start : start + BATCH]
