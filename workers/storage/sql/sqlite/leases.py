"""How leases are extended, and what becomes of jobs whose lease ran out."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import Row, text

from workers.errors import LossReason
from workers.jobs import Claim, ErrorInfo, JobEventKind, ProgressReport, Recovery, Renewal
from workers.storage.rules import stalled_error
from workers.storage.sql.rows import (
    SKIP,
    RowState,
    Transaction,
    batches,
    decode_token,
    duration,
    encode_error,
    expanding,
    locking,
)
from workers.storage.sql.sqlite.claim import see, unhold
from workers.storage.sql.sqlite.enqueue import delete

# +queue: no index on the queue alone may look better to the planner than the row numbers.
_HOLDERS = expanding(
    "SELECT seq, id, token, cancel_requested FROM workers_jobs"
    " WHERE seq IN :seqs AND +queue = :queue AND state = 'processing'",
    "seqs",
)
_EXTEND = expanding("UPDATE workers_jobs SET lease_until = :lease_until WHERE seq IN :seqs", "seqs")
_STATES = expanding("SELECT id, state, expires_at FROM workers_jobs WHERE queue = :queue AND id IN :ids", "ids")
_REPORT = text(
    "UPDATE workers_jobs SET progress = :progress"
    " WHERE seq = :seq AND +queue = :queue AND id = :id AND token = :token AND state = 'processing'"
)
_EXPIRED = text(
    "SELECT seq, ordering_key FROM workers_jobs"
    " WHERE queue = :queue AND state = 'processing' AND lease_until <= :now ORDER BY lease_until LIMIT :limit"
)
_LOCK_KEYS = text("SELECT workers_lock_keys(:queue, CAST(:seqs AS bigint[]))")
_STALLED = locking(
    "SELECT seq, id, attempts, max_attempts, stalls, worker, keep_failed, ordering_key FROM workers_jobs"
    " WHERE seq IN :seqs AND state = 'processing' AND lease_until <= :now",
    SKIP,
    lists="seqs",
)
_REQUEUE = text(
    "UPDATE workers_jobs SET state = 'ready', stalls = stalls + 1, token = NULL, worker = NULL, lease_until = NULL"
    " WHERE seq = :seq"
)
_GIVE_UP = text(
    "UPDATE workers_jobs SET state = 'failed', stalls = stalls + 1, token = NULL, worker = NULL, lease_until = NULL,"
    " cancel_requested = 0, finished_at = :now, expires_at = :expires_at, error = :error WHERE seq = :seq"
)


def renew(transaction: Transaction, claims: Sequence[Claim]) -> Renewal:
    """See `Storage.renew`."""
    see(transaction, {claim.worker_id for claim in claims})
    asked = {decode_token(claim.token): claim for claim in claims}
    extended: dict[timedelta, list[int]] = {}
    held: set[str] = set()
    cancelled: set[str] = set()
    for batch in batches([seq for seq, _ in asked]):
        rows = transaction.connection.execute(_HOLDERS, {"queue": transaction.queue, "seqs": list(batch)})
        for seq, job_id, secret, cancel_requested in rows:
            claim = asked.get((seq, secret))
            if claim is not None and claim.job_id == job_id:
                held.add(claim.token)
                extended.setdefault(claim.lease, []).append(seq)
                if cancel_requested:
                    cancelled.add(claim.token)
    for lease, seqs in extended.items():
        for batch in batches(seqs):
            until = transaction.now + duration(lease)
            transaction.connection.execute(_EXTEND, {"lease_until": until, "seqs": list(batch)})
    lost = [claim for claim in claims if claim.token not in held]
    reasons = why_lost(transaction, [claim.job_id for claim in lost])
    return Renewal(lost={claim.token: reasons[claim.job_id] for claim in lost}, cancel_requested=frozenset(cancelled))


def progress(transaction: Transaction, reports: Sequence[ProgressReport]) -> None:
    """See `Storage.progress`."""
    for report in reports:
        seq, secret = decode_token(report.claim.token)
        place = {"queue": transaction.queue, "seq": seq, "id": report.claim.job_id, "token": secret}
        if transaction.connection.execute(_REPORT, {**place, "progress": report.value}).rowcount:
            transaction.announce(JobEventKind.PROGRESS, [report.claim.job_id])


def why_lost(transaction: Transaction, ids: Sequence[str]) -> dict[str, LossReason]:
    """Why a claim that does not hold its job any more lost it, by job id."""
    reasons = dict.fromkeys(ids, LossReason.NOT_FOUND)
    for batch in batches([transaction.encode(job_id) for job_id in reasons]):
        rows = transaction.connection.execute(_STATES, {"queue": transaction.queue, "ids": list(batch)})
        for encoded, state, expires_at in rows:
            job_id = transaction.decode(encoded)
            if expires_at is None:
                reasons[job_id] = LossReason.TAKEN
            elif state != RowState.CANCELLED and expires_at > transaction.now:
                reasons[job_id] = LossReason.COMPLETED
    return reasons


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
        transaction.connection.execute(_REQUEUE, [{"seq": row.seq} for row in requeued])
        transaction.wake = True
    if failed:
        given_up = [
            {
                "seq": row.seq,
                "now": transaction.now,
                "expires_at": transaction.now + row.keep_failed,
                "error": encode_error(_stalled(row, transaction.decode(row.worker), max_stalls)),
            }
            for row in failed
        ]
        transaction.connection.execute(_GIVE_UP, given_up)
    delete(transaction, [row.seq for row in dropped])
    unhold(transaction, [row.ordering_key for row in rows])
    again = tuple(transaction.decode(row.id) for row in requeued)
    gone = tuple(transaction.decode(row.id) for row in failed + dropped)
    transaction.announce(JobEventKind.QUEUED, again)
    transaction.announce(JobEventKind.FAILED, gone)
    return Recovery(requeued=again, failed=gone)


def _stalled_rows(transaction: Transaction, expired: Sequence[Row[Any]]) -> list[Row[Any]]:
    """The expired jobs, theirs being the ordering keys; the rows are locked after these, as everywhere."""
    seqs = [row.seq for row in expired]
    if transaction.dialect == "postgresql" and any(row.ordering_key is not None for row in expired):
        transaction.connection.execute(_LOCK_KEYS, {"queue": transaction.queue, "seqs": seqs})
    rows: list[Row[Any]] = []
    for batch in batches(seqs):
        place = {"seqs": list(batch), "now": transaction.now}
        rows += transaction.connection.execute(_STALLED[transaction.dialect], place)
    return rows


def _stalled(row: Row[Any], worker: str, max_stalls: int) -> ErrorInfo:
    return stalled_error(
        worker=worker,
        attempts=row.attempts,
        max_attempts=row.max_attempts,
        stalls=row.stalls + 1,
        max_stalls=max_stalls,
    )
