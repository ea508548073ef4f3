"""How those ended that a job came after: the copies in `workers_outcomes`, which the job can read.

Theory of operation. A copy is made in the step that ends the other job, or by the enqueue if that had ended before. So
nothing that becomes of its record takes it away. On PostgreSQL `workers_release` makes those of the first kind. A
result is in the place of the payload before anybody is told of the end. The rows of jobs that follow others, or did,
are marked (`follows`): with those alone a trigger deletes the copies, however the row goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from sqlalchemy import RowMapping, text

from workers.errors import ErrorInfo
from workers.jobs import JobOutcome, JobRef, JobState, OutcomeKind
from workers.storage.rules import COPIED_BYTES
from workers.storage.sql.rows import Transaction, batches, decode_error, encode_error, expanding

REMOVED: Final = "removed"
"""The end of a job of which there is no record."""

_WIPE = expanding("DELETE FROM workers_outcomes WHERE queue = :queue AND job_id IN :ids", "ids")
_BEGIN = expanding("UPDATE workers_jobs SET follows = 1 WHERE seq IN :seqs", "seqs")
_LEARN: Final = "INSERT INTO workers_outcomes (queue, job_id, other_queue, other_id, ended, error, result)"
_LEARN_AT_ONCE = text(
    _LEARN + " VALUES (:queue, :job_id, :other_queue, :other_id, :ended, :error, "  # noqa: S608 - our own text
    "(SELECT data FROM workers_payloads WHERE seq = :seq AND length(data) <= :most))"
)
_RESULT: Final = (
    " (SELECT p.data FROM workers_jobs o JOIN workers_payloads p ON p.seq = o.seq WHERE o.queue = d.queue"
    " AND o.id = d.job_id AND length(p.data) <= :most AND "
)
_OF: Final = (
    " FROM workers_dependencies d JOIN workers_jobs j ON j.seq = d.dependent JOIN workers_queues q ON q.id = d.queue"
    " WHERE d.queue = :queue AND d.job_id = :job_id AND "
)
# What `learn_last` has told is told better there: by now the row may be gone.
_LEARN_END = text(
    _LEARN
    + " SELECT j.queue, j.id, q.name, d.job_id, d.ended, d.error,"
    + _RESULT
    + "o.state = 'completed')"
    + _OF
    + "d.dependent = :seq ON CONFLICT DO NOTHING"
)
_LEARN_LAST = text(
    _LEARN
    + " SELECT j.queue, j.id, q.name, d.job_id, :ended, :error,"
    + _RESULT
    + ":ended = 'completed')"
    + _OF
    + "d.ended IS NULL ON CONFLICT DO NOTHING"
)
_OUTCOMES = text(
    "SELECT other_queue, other_id, ended, error, result FROM workers_outcomes WHERE queue = :queue AND job_id = :id"
)

_MOST: Final[Mapping[str, object]] = {"most": COPIED_BYTES}
_NO_ROW: Final = -1


class End(NamedTuple):
    """How a job ended, whose row is still there."""

    seq: int
    state: JobState
    error: ErrorInfo | None


def begin(transaction: Transaction, rows: Sequence[RowMapping]) -> None:
    """Mark the rows of jobs that follow others, and delete what earlier links of theirs were told."""
    for batch in batches(rows):
        place = {"queue": transaction.queue, "ids": [row["id"] for row in batch]}
        transaction.connection.execute(_WIPE, place)
        transaction.connection.execute(_BEGIN, {"seqs": [row["seq"] for row in batch]})


def learn(transaction: Transaction, job_id: str, over: Sequence[tuple[JobRef, End | None]]) -> None:
    """Tell the job, whose id is as the database has it, how those ended that have; None: nobody knows them."""
    if over:
        own = {**_MOST, "queue": transaction.queue, "job_id": job_id}
        rows = [{**own, **_told(transaction, other, end)} for other, end in over]
        transaction.connection.execute(_LEARN_AT_ONCE, rows)


def _told(transaction: Transaction, other: JobRef, end: End | None) -> dict[str, object]:
    failed = end is not None and end.state is JobState.FAILED
    return {
        "other_queue": transaction.encode(other.queue),
        "other_id": transaction.encode(other.id),
        "ended": REMOVED if end is None else end.state.value,
        "error": encode_error(end.error) if failed and end is not None and end.error is not None else None,
        "seq": end.seq if end is not None and end.state is JobState.COMPLETED else _NO_ROW,
    }


def learn_last(transaction: Transaction, end: Mapping[str, object]) -> None:
    """Tell the dependents how a job ended whose row is about to be deleted, on SQLite."""
    transaction.connection.execute(_LEARN_LAST, {**_MOST, **end})


def learn_ends(transaction: Transaction, dependencies: Sequence[Mapping[str, object]]) -> None:
    """Tell each of these dependents how the other job ended, on SQLite."""
    transaction.connection.execute(_LEARN_END, [{**_MOST, **one} for one in dependencies])


def outcomes(transaction: Transaction, job_id: str) -> dict[JobRef, JobOutcome | None]:
    """See `KnowsDependencies.outcomes`."""
    place = {"queue": transaction.queue, "id": transaction.encode(job_id)}
    found: dict[JobRef, JobOutcome | None] = {}
    for row in transaction.connection.execute(_OUTCOMES, place):
        other = JobRef(transaction.decode(row.other_queue), transaction.decode(row.other_id))
        found[other] = None
        if row.ended != REMOVED:
            kind, error = OutcomeKind(row.ended), decode_error(row.error)
            found[other] = JobOutcome(kind=kind, result=row.result, error=error)
    return found
