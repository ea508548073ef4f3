"""The operator's steps: cancel, retry, remove, complete, promote, drain, clean, pause."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from sqlalchemy import RowMapping, text

from workers.jobs import CancelResult, JobEventKind, JobState, Moved, NewJob, Retention
from workers.metadata import encode_meta
from workers.retention import kept_for_waiters, told_with_the_end
from workers.storage.rules import STARTS_ANEW, check_cleanable, link_is_over
from workers.storage.sql.rows import (
    DELAYED,
    ENDED,
    SKIP,
    WAIT,
    RowState,
    Transaction,
    batches,
    decode_retention,
    duration,
    encode_backoff,
    encode_retention,
    expanding,
    locking,
    next_seq,
    public_state,
)
from workers.storage.sql.steps.dependents import tell_end
from workers.storage.sql.steps.ends import delete, unhold

_FIND = locking(
    "SELECT seq, id, state, run_at, ordering_key, keep_completed, keep_failed, dependents, chain_index"
    " FROM workers_jobs"
    " WHERE queue = :queue AND id IN :ids AND (expires_at IS NULL OR expires_at > :now) ORDER BY seq",
    WAIT,
    lists="ids",
)
_KEYED = expanding(
    "SELECT seq FROM workers_jobs WHERE queue = :queue AND id IN :ids AND ordering_key IS NOT NULL", "ids"
)
_LOCK_KEYS = text("SELECT workers_lock_keys(:queue, CAST(:seqs AS bigint[]))")
_RESULT = text("UPDATE workers_payloads SET data = :data WHERE seq = :seq")
_COMPLETE = text(
    "UPDATE workers_jobs SET state = 'completed', token = NULL, worker = NULL, lease_until = NULL,"
    " cancel_requested = 0, finished_at = :now, expires_at = :expires_at WHERE seq = :seq"
)
_CANCEL = text(
    "UPDATE workers_jobs SET state = 'cancelled', token = NULL, cancel_requested = 0, finished_at = :now,"
    " expires_at = :expires_at WHERE seq = :seq"
)
_NEXT_POSTGRES = text("SELECT nextval('workers_jobs_seq_seq')")
_GO_ON = text(
    "UPDATE workers_jobs SET seq = :next, name = :name, state = :state, priority = :priority, run_at = :run_at,"
    " attempts = 0, max_attempts = :max_attempts, stalls = 0, uncounted = 0, cancel_requested = 0,"
    " keep_completed = :keep_completed, keep_failed = :keep_failed, ordering_key = :ordering_key, backoff = :backoff,"
    " chain_index = :chain_index, meta = :meta, token = NULL, worker = NULL, lease_until = NULL, error = NULL,"
    " failures = NULL WHERE seq = :seq"
)
_GO_ON_WITH = text("UPDATE workers_payloads SET seq = :next, data = :data WHERE seq = :seq")
_REQUEST = text("UPDATE workers_jobs SET cancel_requested = 1 WHERE seq = :seq")
_AGAIN = expanding(
    "UPDATE workers_jobs SET state = 'ready', run_at = :now, attempts = 0, stalls = 0, uncounted = 0, token = NULL,"
    " finished_at = NULL, expires_at = NULL, error = NULL, failures = NULL, progress = NULL, deduplication_key = NULL"
    " WHERE seq IN :seqs",
    "seqs",
)
_PROMOTE = expanding("UPDATE workers_jobs SET state = 'ready', run_at = :now WHERE seq IN :seqs", "seqs")
_LAST = text("SELECT coalesce(max(seq), 0) FROM workers_jobs")
# The last term of each condition is always true, but makes the planner choose the right index.
_OF_QUEUE = "SELECT seq, ordering_key FROM workers_jobs WHERE queue = :queue"
_WAITING: Final = [
    locking(_OF_QUEUE + condition + " AND seq <= :last LIMIT :limit", SKIP)
    for condition in (
        " AND state = 'waiting' AND run_at >= 0",
        " AND state = 'ready' AND priority >= -1000",
        " AND state = 'held' AND ordering_key >= ''",
        " AND state IN ('scheduled', 'failing') AND run_at >= 0",
    )
]
_OLD = locking(
    "SELECT seq FROM workers_jobs WHERE queue = :queue AND state = :state AND expires_at > :now"
    " AND finished_at <= :before ORDER BY expires_at LIMIT :limit",
    SKIP,
)
_IS_PAUSED = text("SELECT paused FROM workers_queues WHERE id = :queue")
_PAUSE = text("UPDATE workers_queues SET paused = :paused WHERE id = :queue")
_KEEP = text("UPDATE workers_jobs SET expires_at = :expires_at WHERE seq = :seq")


def _find(transaction: Transaction, ids: Sequence[str]) -> list[RowMapping]:
    """Return the visible jobs among `ids`."""
    found: list[RowMapping] = []
    for batch in batches([transaction.encode(job_id) for job_id in dict.fromkeys(ids)]):
        bound = {"queue": transaction.queue, "now": transaction.now, "ids": list(batch)}
        found += transaction.connection.execute(_FIND[transaction.dialect], bound).mappings()
    return found


def _find_to_end(transaction: Transaction, ids: Sequence[str]) -> list[RowMapping]:
    """Find jobs to end them. Of running ones the ordering keys are locked too, before the rows, as everywhere.

    A row keeps the key it began with: a job that goes on under another key has another number.
    """
    if transaction.dialect == "sqlite":
        return _find(transaction, ids)
    locked: set[int] = set()
    while True:
        for batch in batches([transaction.encode(job_id) for job_id in dict.fromkeys(ids)]):
            bound = {"queue": transaction.queue, "ids": list(batch)}
            locked.update(transaction.connection.execute(_KEYED, bound).scalars())
        if locked:
            transaction.connection.execute(_LOCK_KEYS, {"queue": transaction.queue, "seqs": list(locked)})
        found = _find(transaction, ids)
        if all(row["ordering_key"] is None or row["seq"] in locked for row in found):
            return found


def cancel(transaction: Transaction, job_id: str) -> CancelResult:
    """See `Storage.cancel`."""
    found = _find(transaction, [job_id])
    if not found:
        return CancelResult.NOT_FOUND
    row = found[0]
    if row["state"] in ENDED:
        return CancelResult(row["state"])
    if row["state"] == RowState.PROCESSING:
        transaction.connection.execute(_REQUEST, {"seq": row["seq"]})
        transaction.announce(JobEventKind.CANCEL_REQUESTED, [job_id])
        return CancelResult.PROCESSING
    transaction.ends = True
    if row["keep_failed"] is None:
        if row["dependents"]:
            tell_end(transaction, row["id"], RowState.CANCELLED)
        delete(transaction, [row["seq"]])
    else:
        until = transaction.now + row["keep_failed"]
        transaction.connection.execute(_CANCEL, {"seq": row["seq"], "now": transaction.now, "expires_at": until})
    unhold(transaction, [row["ordering_key"]])
    transaction.announce(JobEventKind.CANCELLED, [job_id])
    return CancelResult.CANCELLED


def retry(transaction: Transaction, ids: Sequence[str]) -> Moved:
    """See `Storage.retry`."""
    again = [row for row in _find(transaction, ids) if row["state"] in STARTS_ANEW]
    for batch in batches([row["seq"] for row in again]):
        transaction.connection.execute(_AGAIN, {"now": transaction.now, "seqs": list(batch)})
    moved = Moved(transaction.decode(row["id"]) for row in again)
    transaction.announce(JobEventKind.QUEUED, moved.ids)
    transaction.wake = transaction.wake or bool(moved)
    return moved


def remove(transaction: Transaction, ids: Sequence[str], running: bool) -> int:
    """See `Storage.remove`."""
    found = _find_to_end(transaction, ids) if running else _find(transaction, ids)
    gone = [row for row in found if running or row["state"] != RowState.PROCESSING]
    _tell_workers(transaction, gone)
    transaction.ends = True
    delete(transaction, [row["seq"] for row in gone])
    unhold(transaction, [row["ordering_key"] for row in gone])
    return len(gone)


def complete(transaction: Transaction, job_id: str, result: bytes, keep: Retention | None) -> JobState | None:
    """See `Storage.complete`."""
    found = _find_to_end(transaction, [job_id])
    if not found:
        return None
    row = found[0]
    if row["state"] not in ENDED:
        _tell_workers(transaction, found)
        kept = kept_for_waiters(result, decode_retention(row["keep_completed"]) if keep is None else keep)
        _store_result(transaction, row, result, encode_retention(kept))
        unhold(transaction, [row["ordering_key"]])
        transaction.events.append((JobEventKind.COMPLETED, job_id, told_with_the_end(result, kept)))
    return public_state(row["state"], row["run_at"], transaction.now)


def continue_job(transaction: Transaction, then: NewJob) -> JobState | None:
    """See `ContinuesFromOutside.continue_job`."""
    found = _find_to_end(transaction, [then.id])
    if not found:
        return None
    row = found[0]
    if row["state"] not in ENDED:
        if then.chain_index != row["chain_index"] + 1:
            raise link_is_over(then.id)
        _tell_workers(transaction, found)
        _go_on(transaction, row["seq"], then)
        unhold(transaction, [row["ordering_key"]])
        transaction.announce(JobEventKind.QUEUED, [then.id])
        transaction.wake = True
    return public_state(row["state"], row["run_at"], transaction.now)


def _go_on(transaction: Transaction, seq: int, then: NewJob) -> None:
    """Make the job the next link; its new number puts it behind everything that is there."""
    sqlite = transaction.dialect == "sqlite"
    number = next_seq(transaction) if sqlite else transaction.connection.execute(_NEXT_POSTGRES).scalar_one()
    link = {
        "name": transaction.encode(then.name),
        "state": RowState.SCHEDULED.value if then.delay else RowState.READY.value,
        "priority": then.priority,
        "run_at": transaction.now + duration(then.delay),
        "max_attempts": then.max_attempts,
        "keep_completed": encode_retention(then.keep_completed),
        "keep_failed": encode_retention(then.keep_failed),
        "ordering_key": None if then.holding_key is None else transaction.encode(then.holding_key),
        "backoff": encode_backoff(then.backoff),
        "chain_index": then.chain_index,
        "meta": encode_meta(then.meta) if then.meta else None,
    }
    transaction.connection.execute(_GO_ON, {"next": number, "seq": seq, **link})
    transaction.connection.execute(_GO_ON_WITH, {"next": number, "seq": seq, "data": then.payload})


def _tell_workers(transaction: Transaction, ended: Sequence[RowMapping]) -> None:
    """Tell the workers of these jobs to look, so that they notice the loss."""
    running = [transaction.decode(row["id"]) for row in ended if row["state"] == RowState.PROCESSING]
    transaction.announce(JobEventKind.CANCEL_REQUESTED, running)


def _store_result(transaction: Transaction, row: RowMapping, result: bytes, keep: int | None) -> None:
    transaction.ends = True
    seq, now = row["seq"], transaction.now
    if keep is not None or row["dependents"]:
        transaction.connection.execute(_RESULT, {"seq": seq, "data": result})
    if keep is None:
        if row["dependents"]:
            tell_end(transaction, row["id"], RowState.COMPLETED)
        delete(transaction, [seq])
        return
    transaction.connection.execute(_COMPLETE, {"seq": seq, "now": now, "expires_at": now + keep})


def promote(transaction: Transaction, ids: Sequence[str]) -> int:
    """See `Storage.promote`."""
    found = _find(transaction, ids)
    waiting = [row for row in found if row["state"] == RowState.WAITING]
    delayed = [row["seq"] for row in found if row["state"] in DELAYED and row["run_at"] > transaction.now]
    delayed += [row["seq"] for row in waiting]
    for batch in batches(delayed):
        transaction.connection.execute(_PROMOTE, {"now": transaction.now, "seqs": list(batch)})
    transaction.announce(JobEventKind.QUEUED, [transaction.decode(row["id"]) for row in waiting])
    transaction.wake = transaction.wake or bool(delayed)
    return len(delayed)


def last_seq(transaction: Transaction) -> int:
    """Return the newest job's number: jobs enqueued later have higher ones."""
    return int(transaction.connection.execute(_LAST).scalar_one())


def drain(transaction: Transaction, *, last: int, limit: int) -> int:
    """Remove up to `limit` waiting jobs numbered up to `last`, and return how many; 0 when none is left."""
    bound = {"queue": transaction.queue, "last": last, "limit": limit}
    for statement in _WAITING:
        waiting = transaction.connection.execute(statement[transaction.dialect], bound).all()
        if waiting:
            transaction.ends = True
            delete(transaction, [row.seq for row in waiting])
            unhold(transaction, [row.ordering_key for row in waiting])
            return len(waiting)
    return 0


def clean(transaction: Transaction, state: JobState, older_than: timedelta, limit: int) -> int:
    """See `Storage.clean`."""
    check_cleanable(state)
    before = transaction.now - duration(older_than)
    bound = {"queue": transaction.queue, "now": transaction.now, "state": state.value, "before": before}
    old = transaction.connection.execute(_OLD[transaction.dialect], {**bound, "limit": limit}).scalars().all()
    delete(transaction, old)
    return len(old)


def set_paused(transaction: Transaction, paused: bool) -> None:
    """Let claims find nothing, or let them find jobs again."""
    transaction.connection.execute(_PAUSE, {"queue": transaction.queue, "paused": int(paused)})
    transaction.wake = not paused


def is_paused(transaction: Transaction) -> bool:
    """Tell whether claims find nothing."""
    return bool(transaction.connection.execute(_IS_PAUSED, {"queue": transaction.queue}).scalar())


def keep(transaction: Transaction, job_id: str, ttl: timedelta) -> bool:
    """See `Storage.update_result_ttl`."""
    found = _find(transaction, [job_id])
    if not found or found[0]["state"] not in ENDED:
        return False
    transaction.connection.execute(_KEEP, {"seq": found[0]["seq"], "expires_at": transaction.now + duration(ttl)})
    return True
