"""How jobs come into the tables: new ones, and new generations of ended ones.

Theory of operation. A transition reads the rows it is about, decides in Python, and writes them back in batches. That
is sound because the transaction holds the write lock from its start (`BEGIN IMMEDIATE`, or `lock` in a caller's own).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import RowMapping, text

from workers.jobs import EnqueueResult, EnqueueStatus, JobEventKind, JobState, NewJob
from workers.storage.sql.keys import Keys
from workers.storage.sql.rows import (
    RowState,
    Transaction,
    batches,
    duration,
    encode_backoff,
    encode_retention,
    expanding,
    next_seq,
    public_state,
)

_LOCK = text("UPDATE workers_queues SET paused = paused WHERE id < 0")
_KNOWN = expanding(
    "SELECT id, seq, state, run_at, expires_at, CASE WHEN state = 'completed' THEN"
    " (SELECT data FROM workers_payloads WHERE workers_payloads.seq = workers_jobs.seq) END AS result"
    " FROM workers_jobs WHERE queue = :queue AND id IN :ids",
    "ids",
)
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
    decision = decide(transaction, jobs)
    delete(transaction, decision.stale)
    _insert(transaction, decision.new)
    decision.keys.write({job.id for job in decision.new})
    return decision.results


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What an enqueue will answer if its `new` jobs are inserted, and what is in their way or was found on it."""

    results: list[EnqueueResult]
    new: list[NewJob]
    stale: list[int]
    keys: Keys


def decide(transaction: Transaction, jobs: Sequence[NewJob]) -> Decision:
    """Nothing is written, but that the new jobs' deduplication keys are theirs to have."""
    keys = Keys(transaction, jobs)
    found, stale = _known(transaction, jobs)
    results, new = [], []
    for job in jobs:
        result = found.get(job.id)
        if result is None and job.deduplication is not None:
            result = keys.duplicate(job, job.deduplication, found)
        if result is None:
            result = EnqueueResult(id=job.id, status=EnqueueStatus.QUEUED)
            state = JobState.SCHEDULED if job.delay else JobState.QUEUED
            found[job.id] = EnqueueResult(id=job.id, status=EnqueueStatus.DUPLICATE, existing_state=state)
            new.append(job)
        results.append(result)
    return Decision(results=results, new=new, stale=[stale[job.id] for job in new if job.id in stale], keys=keys)


def _known(transaction: Transaction, jobs: Sequence[NewJob]) -> tuple[dict[str, EnqueueResult], dict[str, int]]:
    """What to say of the ids that exist, and the rows that a new generation replaces."""
    found: dict[str, EnqueueResult] = {}
    stale: dict[str, int] = {}
    for batch in batches([transaction.encode(job.id) for job in jobs]):
        for row in transaction.connection.execute(_KNOWN, {"queue": transaction.queue, "ids": list(batch)}).mappings():
            job_id = transaction.decode(row["id"])
            existing = _existing(transaction, row, job_id)
            if existing is None:
                stale[job_id] = row["seq"]
            else:
                found[job_id] = existing
    return found, stale


def _existing(transaction: Transaction, row: RowMapping, job_id: str) -> EnqueueResult | None:
    if row["expires_at"] is not None and row["expires_at"] <= transaction.now:
        return None
    if row["state"] in (RowState.FAILED, RowState.CANCELLED):
        return None
    state = public_state(row["state"], row["run_at"], transaction.now)
    status = EnqueueStatus.COMPLETED if state is JobState.COMPLETED else EnqueueStatus.DUPLICATE
    return EnqueueResult(id=job_id, status=status, existing_state=state, result=row["result"])


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
