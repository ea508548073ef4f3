"""Renewal of leases, and progress of running jobs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import text

from workers.jobs import Claim, JobEventKind, ProgressReport, Renewal
from workers.storage.sql.endings import why_lost
from workers.storage.sql.rows import (
    Transaction,
    batches,
    decode_token,
    duration,
    expanding,
)
from workers.storage.sql.sqlite.claim import see

# `+queue` keeps the planner from an index on the queue alone; it is to use the row numbers.
_HOLDERS = expanding(
    "SELECT seq, id, token, cancel_requested FROM workers_jobs"
    " WHERE seq IN :seqs AND +queue = :queue AND state = 'processing'",
    "seqs",
)
_EXTEND = expanding("UPDATE workers_jobs SET lease_until = :lease_until WHERE seq IN :seqs", "seqs")
_REPORT = text(
    "UPDATE workers_jobs SET progress = :progress"
    " WHERE seq = :seq AND +queue = :queue AND id = :id AND token = :token AND state = 'processing'"
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
