"""Enqueues: how new jobs, and new generations of ended ones, come into the tables.

Theory of operation. A transition reads the rows it is about, decides in Python, and writes them back in batches. That
is safe because the transaction holds the write lock from its start (`BEGIN IMMEDIATE`, or `lock` in a caller's own).
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import text

from workers.jobs import EnqueueResult, JobEventKind, NewJob
from workers.metadata import encode_meta
from workers.storage.sql.direct import Executor
from workers.storage.sql.rows import (
    RowState,
    Transaction,
    duration,
    encode_backoff,
    encode_retention,
    next_seq,
)
from workers.storage.sql.steps.dependents import insert, refuse_unknown
from workers.storage.sql.steps.ends import delete
from workers.storage.sql.steps.enqueue import decide

_LOCK = text("UPDATE workers_queues SET paused = paused WHERE id < 0")
_INSERT = text(
    "INSERT INTO workers_jobs (seq, queue, id, name, state, priority, run_at, created_at, max_attempts,"
    " keep_completed, keep_failed, ordering_key, backoff, chain_index, meta)"
    " VALUES (:seq, :queue, :id, :name, :state, :priority, :run_at, :now, :max_attempts,"
    " :keep_completed, :keep_failed, :ordering_key, :backoff, :chain_index, :meta)"
)
_INSERT_PAYLOAD = text("INSERT INTO workers_payloads (seq, data) VALUES (:seq, :data)")


def lock(connection: Executor) -> None:
    """Take the write lock, because the caller's transaction may have begun without it. Nothing is changed.

    A transaction that read first could not get the lock any more once another connection has written.
    """
    connection.execute(_LOCK)


def enqueue(transaction: Transaction, jobs: Sequence[NewJob]) -> list[EnqueueResult]:
    """See `Storage.enqueue`."""
    refuse_unknown(transaction, jobs)
    return add(transaction, jobs)


def add(transaction: Transaction, jobs: Sequence[NewJob]) -> list[EnqueueResult]:
    """Enqueue jobs; those that nobody knows whom they are to follow count as gone."""
    decision = decide(transaction, jobs)
    delete(transaction, decision.stale)
    _insert(transaction, decision.new)
    insert(transaction, decision.new)
    decision.keys.write({job.id for job in decision.new})
    return decision.results


def _insert(transaction: Transaction, jobs: Sequence[NewJob]) -> None:
    if not jobs:
        return
    first = next_seq(transaction)
    bound = {"queue": transaction.queue, "now": transaction.now}
    rows = [{**bound, "seq": seq, "id": job.id, **fields(transaction, job)} for seq, job in enumerate(jobs, first)]
    transaction.connection.execute(_INSERT, rows)
    payloads = [{"seq": seq, "data": job.payload} for seq, job in enumerate(jobs, first)]
    transaction.connection.execute(_INSERT_PAYLOAD, payloads)
    transaction.announce(JobEventKind.QUEUED, [job.id for job in jobs])
    transaction.wake = True


def fields(transaction: Transaction, job: NewJob) -> dict[str, int | str | None]:
    """Return the columns that a job begins with, whether it is new or goes on."""
    return {
        "name": job.name,
        "state": RowState.SCHEDULED.value if job.delay else RowState.READY.value,
        "priority": job.priority,
        "run_at": transaction.now + duration(job.delay),
        "max_attempts": job.max_attempts,
        "keep_completed": encode_retention(job.keep_completed),
        "keep_failed": encode_retention(job.keep_failed),
        "ordering_key": job.holding_key,
        "backoff": encode_backoff(job.backoff),
        "chain_index": job.chain_index,
        "meta": encode_meta(job.meta) if job.meta else None,
    }
