"""How jobs come into the tables: new ones, and new generations of ended ones.

Theory of operation. A transition reads the rows it is about, decides in Python, and writes them back in batches. That
is sound because the transaction holds the write lock from its start (`BEGIN IMMEDIATE`, or `lock` in a caller's own).
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import RowMapping, text

from workers.jobs import EnqueueResult, EnqueueStatus, JobEventKind, JobState, NewJob
from workers.storage.sql_rows import (
    RowState,
    Transaction,
    batches,
    duration,
    encode_backoff,
    encode_retention,
    expanding,
    public_state,
)

_LOCK = text("UPDATE workers_queues SET paused = paused WHERE id < 0")
_KNOWN = expanding(
    "SELECT id, seq, state, run_at, expires_at, ordering_key FROM workers_jobs WHERE queue = :queue AND id IN :ids",
    "ids",
)
_LAST = text("SELECT coalesce(max(seq), 0) FROM workers_jobs")
_PAYLOAD = text("SELECT data FROM workers_payloads WHERE seq = :seq")
_INSERT = text(
    "INSERT INTO workers_jobs (seq, queue, id, name, state, priority, run_at, created_at, max_attempts,"
    " keep_completed, keep_failed, ordering_key, backoff, chain_index)"
    " VALUES (:seq, :queue, :id, :name, :state, :priority, :run_at, :now, :max_attempts,"
    " :keep_completed, :keep_failed, :ordering_key, :backoff, :chain_index)"
)
_INSERT_PAYLOAD = text("INSERT INTO workers_payloads (seq, data) VALUES (:seq, :data)")
_DELETE = expanding("DELETE FROM workers_jobs WHERE seq IN :seqs", "seqs")
_DELETE_PAYLOADS = expanding("DELETE FROM workers_payloads WHERE seq IN :seqs", "seqs")


def lock(transaction: Transaction) -> None:
    """The write lock is held, though the caller's transaction may have begun without it; nothing is changed.

    A transaction that read first could no longer get it once another connection has written.
    """
    transaction.connection.execute(_LOCK)


def enqueue(transaction: Transaction, jobs: Sequence[NewJob]) -> list[EnqueueResult]:
    """See `Storage.enqueue`."""
    found: dict[str, EnqueueResult] = {}
    stale: list[int] = []
    for batch in batches([job.id for job in jobs]):
        for row in transaction.connection.execute(_KNOWN, {"queue": transaction.queue, "ids": list(batch)}).mappings():
            existing = _existing(transaction, row)
            if existing is None:
                stale.append(row["seq"])
            else:
                found[row["id"]] = existing
    delete(transaction, stale)
    results, new = [], []
    for job in jobs:
        result = found.get(job.id)
        if result is None:
            result = EnqueueResult(id=job.id, status=EnqueueStatus.QUEUED)
            state = JobState.SCHEDULED if job.delay else JobState.QUEUED
            found[job.id] = EnqueueResult(id=job.id, status=EnqueueStatus.DUPLICATE, existing_state=state)
            new.append(job)
        results.append(result)
    _insert(transaction, new)
    return results


def _existing(transaction: Transaction, row: RowMapping) -> EnqueueResult | None:
    if row["expires_at"] is not None and row["expires_at"] <= transaction.now:
        return None
    if row["state"] in (RowState.FAILED, RowState.CANCELLED):
        return None
    state = public_state(row["state"], row["run_at"], transaction.now)
    if state is not JobState.COMPLETED:
        return EnqueueResult(id=row["id"], status=EnqueueStatus.DUPLICATE, existing_state=state)
    result = transaction.connection.execute(_PAYLOAD, {"seq": row["seq"]}).scalar_one()
    return EnqueueResult(id=row["id"], status=EnqueueStatus.COMPLETED, existing_state=state, result=result)


def _insert(transaction: Transaction, jobs: Sequence[NewJob]) -> None:
    if not jobs:
        return
    first = next_seq(transaction)
    place = {"queue": transaction.queue, "now": transaction.now}
    rows = [{**place, "seq": seq, "id": job.id, **fields(transaction, job)} for seq, job in enumerate(jobs, first)]
    transaction.connection.execute(_INSERT, rows)
    payloads = [{"seq": seq, "data": job.payload} for seq, job in enumerate(jobs, first)]
    transaction.connection.execute(_INSERT_PAYLOAD, payloads)
    transaction.announce(JobEventKind.QUEUED, [job.id for job in jobs])
    transaction.wake = True


def next_seq(transaction: Transaction) -> int:
    """The number of the next row; given here, not by SQLite, because a batched INSERT cannot tell it."""
    return int(transaction.connection.execute(_LAST).scalar_one()) + 1


def fields(transaction: Transaction, job: NewJob) -> dict[str, int | str | None]:
    """What a row has of the job that it begins as, whether it is new or goes on."""
    return {
        "name": job.name,
        "state": RowState.SCHEDULED.value if job.delay else RowState.READY.value,
        "priority": job.priority,
        "run_at": transaction.now + duration(job.delay),
        "max_attempts": job.max_attempts,
        "keep_completed": encode_retention(job.keep_completed),
        "keep_failed": encode_retention(job.keep_failed),
        "ordering_key": job.ordering_key,
        "backoff": encode_backoff(job.backoff),
        "chain_index": job.chain_index,
    }


def delete(transaction: Transaction, seqs: Sequence[int]) -> None:
    """The jobs are gone without a trace."""
    for batch in batches(seqs):
        transaction.connection.execute(_DELETE, {"seqs": list(batch)})
        transaction.connection.execute(_DELETE_PAYLOADS, {"seqs": list(batch)})
