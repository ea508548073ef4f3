"""Recovery of jobs whose lease ran out, on both databases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, text

from workers.jobs import ErrorInfo, JobEventKind, Recovery
from workers.storage.failures import lost_attempt, with_failure
from workers.storage.rules import stalled_error
from workers.storage.sql.dependents import tell_end
from workers.storage.sql.endings import delete, unhold
from workers.storage.sql.rows import SKIP, RowState, Transaction, batches, encode_error, locking, moment

_EXPIRED = text(
    "SELECT seq, ordering_key FROM workers_jobs"
    " WHERE queue = :queue AND state = 'processing' AND lease_until <= :now ORDER BY lease_until LIMIT :limit"
)
_LOCK_KEYS = text("SELECT workers_lock_keys(:queue, CAST(:seqs AS bigint[]))")
_STALLED = locking(
    "SELECT seq, id, attempts, max_attempts, stalls, worker, keep_failed, ordering_key, dependents, failures"
    " FROM workers_jobs"
    " WHERE seq IN :seqs AND state = 'processing' AND lease_until <= :now",
    SKIP,
    lists="seqs",
)
_REQUEUE = text(
    "UPDATE workers_jobs SET state = 'ready', stalls = stalls + 1, token = NULL, worker = NULL, lease_until = NULL,"
    " failures = :failures WHERE seq = :seq"
)
_GIVE_UP = text(
    "UPDATE workers_jobs SET state = 'failed', stalls = stalls + 1, token = NULL, worker = NULL, lease_until = NULL,"
    " cancel_requested = 0, finished_at = :now, expires_at = :expires_at, error = :error, failures = :failures"
    " WHERE seq = :seq"
)


def recover(transaction: Transaction, limit: int, *, max_stalls: int) -> Recovery:
    """See `Storage.recover`."""
    place = {"queue": transaction.queue, "now": transaction.now, "limit": limit}
    requeued, failed, dropped = [], [], []
    rows = _stalled_rows(transaction, transaction.connection.execute(_EXPIRED, place).all())
    for row in rows:
        if row.stalls < max_stalls and row.attempts < row.max_attempts:
            requeued.append(row)
        elif row.keep_failed is None:
            dropped.append(row)
        else:
            failed.append(row)
    if requeued:
        again = [{"seq": row.seq, "failures": _failures(row, transaction)} for row in requeued]
        transaction.connection.execute(_REQUEUE, again)
        transaction.wake = True
    if failed:
        given_up = [
            {
                "seq": row.seq,
                "now": transaction.now,
                "expires_at": transaction.now + row.keep_failed,
                "error": encode_error(_stalled(row, transaction.decode(row.worker), max_stalls)),
                "failures": _failures(row, transaction),
            }
            for row in failed
        ]
        transaction.connection.execute(_GIVE_UP, given_up)
    transaction.ends = True
    for row in dropped:
        if row.dependents:
            error = _stalled(row, transaction.decode(row.worker), max_stalls)
            tell_end(transaction, row.id, RowState.FAILED, encode_error(error))
    delete(transaction, [row.seq for row in dropped])
    unhold(transaction, [row.ordering_key for row in rows])
    queued = tuple(transaction.decode(row.id) for row in requeued)
    gone = tuple(transaction.decode(row.id) for row in failed + dropped)
    transaction.announce(JobEventKind.QUEUED, queued)
    transaction.announce(JobEventKind.FAILED, gone)
    return Recovery(requeued=queued, failed=gone)


def _stalled_rows(transaction: Transaction, expired: Sequence[Row[Any]]) -> list[Row[Any]]:
    """Lock and return the rows of expired jobs. Their ordering keys are locked before the rows, as everywhere."""
    seqs = [row.seq for row in expired]
    if transaction.dialect == "postgresql" and any(row.ordering_key is not None for row in expired):
        transaction.connection.execute(_LOCK_KEYS, {"queue": transaction.queue, "seqs": seqs})
    rows: list[Row[Any]] = []
    for batch in batches(seqs):
        place = {"seqs": list(batch), "now": transaction.now}
        rows += transaction.connection.execute(_STALLED[transaction.dialect], place)
    return rows


def _failures(row: Row[Any], transaction: Transaction) -> str | None:
    lost = lost_attempt(row.attempts, transaction.decode(row.worker))
    return with_failure(row.failures, lost, moment(transaction.now))


def _stalled(row: Row[Any], worker: str, max_stalls: int) -> ErrorInfo:
    return stalled_error(
        worker=worker,
        attempts=row.attempts,
        max_attempts=row.max_attempts,
        stalls=row.stalls + 1,
        max_stalls=max_stalls,
    )
