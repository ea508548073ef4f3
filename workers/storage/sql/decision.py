"""The answer to an enqueue, decided in Python before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import RowMapping

from workers.jobs import EnqueueResult, EnqueueStatus, JobState, NewJob
from workers.storage.sql.keys import Keys
from workers.storage.sql.rows import RowState, Transaction, batches, expanding, public_state

_KNOWN = expanding(
    "SELECT id, seq, state, run_at, expires_at, CASE WHEN state = 'completed' THEN"
    " (SELECT data FROM workers_payloads WHERE workers_payloads.seq = workers_jobs.seq) END AS result"
    " FROM workers_jobs WHERE queue = :queue AND id IN :ids",
    "ids",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The answer to an enqueue, which holds if its `new` jobs are inserted, and the rows that must go before."""

    results: list[EnqueueResult]
    new: list[NewJob]
    stale: list[int]
    keys: Keys


def decide(transaction: Transaction, jobs: Sequence[NewJob]) -> Decision:
    """Decide without writing, except that the free deduplication keys of new jobs are reserved."""
    keys = Keys(transaction, jobs)
    found, stale = _known(transaction, jobs)
    results, new = [], []
    for job in jobs:
        result = found.get(job.id)
        if result is None and job.deduplication is not None:
            result = keys.duplicate(job, job.deduplication, found)
        if result is None:
            result = EnqueueResult(id=job.id, status=EnqueueStatus.QUEUED)
            state = JobState.WAITING if job.follows else JobState.SCHEDULED if job.delay else JobState.QUEUED
            found[job.id] = EnqueueResult(id=job.id, status=EnqueueStatus.DUPLICATE, existing_state=state)
            new.append(job)
        results.append(result)
    return Decision(results=results, new=new, stale=[stale[job.id] for job in new if job.id in stale], keys=keys)


def _known(transaction: Transaction, jobs: Sequence[NewJob]) -> tuple[dict[str, EnqueueResult], dict[str, int]]:
    """Return the answers for the ids that exist, and the rows that a new generation replaces."""
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
