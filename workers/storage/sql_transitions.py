"""The steps of a job's life but for its settling, each a plain function inside one short transaction.

Theory of operation. A transition reads the rows it is about, decides in Python, and writes them back in batches. That
is sound because the transaction holds the write lock from its start (`BEGIN IMMEDIATE`).

Of one ordering key at most one job is processing. The key's other jobs are set aside (`held`) when a claim meets them,
so that no claim reads past them twice; when a job of the key leaves the queue or stops processing, the first held job
of each name is ready again. So a key with held jobs always has one that is ready or processing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from typing import Final

from sqlalchemy import Row, TextClause, bindparam, text

from workers.errors import LossReason
from workers.jobs import (
    CancelResult,
    Claim,
    EnqueueResult,
    EnqueueStatus,
    ErrorInfo,
    JobEventKind,
    JobState,
    NewJob,
    Recovery,
    Renewal,
)
from workers.storage.base import ANY_NAME, TOMBSTONE
from workers.storage.sql_rows import (
    BATCH,
    RowState,
    Transaction,
    batches,
    decode_backoff,
    decode_retention,
    decode_token,
    duration,
    encode_backoff,
    encode_error,
    encode_retention,
    encode_token,
    moment,
    public_state,
)

_NAMES_AT_ONCE: Final = 100
_ROUNDS: Final = 8
_WORKER_NOTED: Final = timedelta(seconds=1)


def expanding(statement: str, name: str) -> TextClause:
    """A statement whose parameter `name` is a list."""
    return text(statement).bindparams(bindparam(name, expanding=True))


# Enqueue

_LOCK = text("UPDATE workers_queues SET paused = paused WHERE id < 0")
_KNOWN = expanding(
    "SELECT id, seq, state, run_at, expires_at, ordering_key FROM workers_jobs WHERE queue = :queue AND id IN :ids",
    "ids",
)
_LAST = text("SELECT coalesce(max(seq), 0) FROM workers_jobs")
_PAYLOAD = text("SELECT data FROM workers_payloads WHERE seq = :seq")
_INSERT = text(
    "INSERT INTO workers_jobs (seq, queue, id, name, state, priority, run_at, created_at, max_attempts,"
    " keep_completed, keep_failed, ordering_key, backoff)"
    " VALUES (:seq, :queue, :id, :name, :state, :priority, :run_at, :now, :max_attempts,"
    " :keep_completed, :keep_failed, :ordering_key, :backoff)"
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
        for row in transaction.connection.execute(_KNOWN, {"queue": transaction.queue, "ids": list(batch)}):
            existing = _existing(transaction, row)
            if existing is None:
                stale.append(row.seq)
            else:
                found[row.id] = existing
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


def _existing(transaction: Transaction, row: Row[tuple[str, int, str, int, int | None, str | None]]) -> EnqueueResult | None:
    if row.expires_at is not None and row.expires_at <= transaction.now:
        return None
    if row.state in (RowState.FAILED, RowState.CANCELLED):
        return None
    state = public_state(row.state, row.run_at, transaction.now)
    if state is not JobState.COMPLETED:
        return EnqueueResult(id=row.id, status=EnqueueStatus.DUPLICATE, existing_state=state)
    result = transaction.connection.execute(_PAYLOAD, {"seq": row.seq}).scalar_one()
    return EnqueueResult(id=row.id, status=EnqueueStatus.COMPLETED, existing_state=state, result=result)


def _insert(transaction: Transaction, jobs: Sequence[NewJob]) -> None:
    if not jobs:
        return
    # Numbers are given here, not by the database, because a batched INSERT cannot tell them.
    first = int(transaction.connection.execute(_LAST).scalar_one()) + 1
    rows = [
        {
            "seq": seq,
            "queue": transaction.queue,
            "id": job.id,
            "name": job.name,
            "state": RowState.SCHEDULED.value if job.delay else RowState.READY.value,
            "priority": job.priority,
            "run_at": transaction.now + duration(job.delay) if job.delay else transaction.now,
            "now": transaction.now,
            "max_attempts": job.max_attempts,
            "keep_completed": encode_retention(job.keep_completed),
            "keep_failed": encode_retention(job.keep_failed),
            "ordering_key": job.ordering_key,
            "backoff": encode_backoff(job.backoff),
        }
        for seq, job in enumerate(jobs, first)
    ]
    transaction.connection.execute(_INSERT, rows)
    payloads = [{"seq": seq, "data": job.payload} for seq, job in enumerate(jobs, first)]
    transaction.connection.execute(_INSERT_PAYLOAD, payloads)
    transaction.announce(JobEventKind.QUEUED, [job.id for job in jobs])
    transaction.wake = True


def delete(transaction: Transaction, seqs: Sequence[int]) -> None:
    """The jobs are gone without a trace."""
    for batch in batches(seqs):
        transaction.connection.execute(_DELETE, {"seqs": list(batch)})
        transaction.connection.execute(_DELETE_PAYLOADS, {"seqs": list(batch)})


# Claim

_PAUSED = text("SELECT paused FROM workers_queues WHERE id = :queue")
_PROMOTE = text(
    "UPDATE workers_jobs SET state = 'ready' WHERE seq IN ("
    "SELECT seq FROM workers_jobs WHERE queue = :queue AND state IN ('scheduled', 'failing') AND run_at <= :now"
    " ORDER BY run_at LIMIT :limit)"
)
_IS_DUE = text(
    "SELECT 1 FROM workers_jobs WHERE queue = :queue AND state IN ('scheduled', 'failing') AND run_at <= :now LIMIT 1"
)
_IN_ORDER = " ORDER BY priority, run_at, seq LIMIT :limit"
_OF_ANY_NAME = text(
    "SELECT priority, run_at, seq, ordering_key FROM workers_jobs WHERE queue = :queue AND state = 'ready'" + _IN_ORDER
)
_BUSY_KEYS = expanding(
    "SELECT ordering_key FROM workers_jobs WHERE queue = :queue AND state = 'processing'"
    " AND ordering_key IS NOT NULL AND ordering_key IN :keys",
    "keys",
)
_HOLD = expanding("UPDATE workers_jobs SET state = 'held' WHERE seq IN :seqs", "seqs")
_NAMES = expanding("SELECT seq, name FROM workers_jobs WHERE seq IN :seqs", "seqs")
_CLAIM = expanding(
    "UPDATE workers_jobs SET state = 'processing', attempts = attempts + 1, token = :token, worker = :worker,"
    " lease_until = :lease_until WHERE seq IN :seqs"
    " RETURNING seq, id, name, attempts, max_attempts, created_at, keep_completed, keep_failed, priority, backoff,"
    " (SELECT data FROM workers_payloads WHERE workers_payloads.seq = workers_jobs.seq) AS payload",
    "seqs",
)
_SEE = text(
    "INSERT INTO workers_seen (queue, worker, seen_at) VALUES (:queue, :worker, :now)"
    " ON CONFLICT (queue, worker) DO UPDATE SET seen_at = excluded.seen_at"
    " WHERE excluded.seen_at - workers_seen.seen_at >= :noted"
)


@cache
def of_names(count: int) -> TextClause:
    """The first ready jobs of `count` names; SQLite merges the names' index ranges and stops at the limit."""
    of_one = "SELECT priority, run_at, seq, ordering_key FROM workers_jobs WHERE queue = :queue AND state = 'ready'"
    return text(" UNION ALL ".join(of_one + " AND name = :name" + str(n) for n in range(count)) + _IN_ORDER)


def claim(
    transaction: Transaction, worker_id: str, *, leases: Mapping[str, timedelta], limit: int
) -> list[Claim]:
    """See `Storage.claim`."""
    see(transaction, [worker_id])
    place = {"queue": transaction.queue}
    if limit < 1 or not leases or transaction.connection.execute(_PAUSED, place).scalar_one():
        return []
    promote_due(transaction, limit)
    seqs = _take(transaction, leases, limit)
    claims = {
        claim.token: claim
        for lease, chosen in _by_lease(transaction, seqs, leases).items()
        for claim in _grant(transaction, worker_id, lease, chosen)
    }
    order = {seq: place for place, seq in enumerate(seqs)}
    granted = sorted(claims.values(), key=lambda claim: order[decode_token(claim.token)[0]])
    transaction.announce(JobEventKind.ACTIVE, [claim.job_id for claim in granted])
    return granted


def see(transaction: Transaction, workers: Iterable[str]) -> None:
    """The workers were seen just now, to the second: most claims need not write it."""
    noted = _WORKER_NOTED // timedelta(milliseconds=1)
    rows = [
        {"queue": transaction.queue, "worker": worker, "now": transaction.now, "noted": noted} for worker in workers
    ]
    if rows:
        transaction.connection.execute(_SEE, rows)


def promote_due(transaction: Transaction, limit: int) -> None:
    """Delayed jobs that are due are ready: at least `limit` of them, in the order they became due."""
    place = {"queue": transaction.queue, "now": transaction.now}
    if transaction.connection.execute(_IS_DUE, place).first() is not None:
        transaction.connection.execute(_PROMOTE, {**place, "limit": max(limit, 2 * BATCH)})


def _take(transaction: Transaction, names: Iterable[str], limit: int) -> list[int]:
    """Up to `limit` ready jobs in order, no two of one ordering key and none of a busy one; those are held.

    A long run of held jobs ends the search early; the next claim goes on behind them.
    """
    taken: list[int] = []
    keys: set[str] = set()
    wanted = list(names)
    for _ in range(_ROUNDS):
        candidates = _candidates(transaction, wanted, limit if not keys else limit + BATCH)
        held = _sort_out(transaction, [row for row in candidates if row[2] not in taken], taken, keys, limit)
        if not held:
            break
        transaction.connection.execute(_HOLD, {"seqs": held})
        if len(taken) >= limit:
            break
    return taken


def _sort_out(
    transaction: Transaction,
    candidates: Sequence[tuple[int, int, int, str | None]],
    taken: list[int],
    keys: set[str],
    limit: int,
) -> list[int]:
    """The candidates to hold; the others are taken, up to `limit`. `keys`: those known to be busy, added to here."""
    unknown = {key for _, _, _, key in candidates if key is not None} - keys
    for batch in batches(list(unknown)):
        busy = transaction.connection.execute(_BUSY_KEYS, {"queue": transaction.queue, "keys": list(batch)})
        keys.update(busy.scalars())
    held = []
    for _, _, seq, key in candidates:
        if key is not None and key in keys:
            held.append(seq)
        elif len(taken) < limit:
            taken.append(seq)
            if key is not None:
                keys.add(key)
    return held


def _candidates(
    transaction: Transaction, names: Sequence[str], limit: int
) -> list[tuple[int, int, int, str | None]]:
    place = {"queue": transaction.queue, "limit": limit}
    if ANY_NAME in names:
        return [tuple(row) for row in transaction.connection.execute(_OF_ANY_NAME, place)]
    found: list[tuple[int, int, int, str | None]] = []
    for start in range(0, len(names), _NAMES_AT_ONCE):
        some = names[start : start + _NAMES_AT_ONCE]
        values = {**place, **{"name" + str(n): name for n, name in enumerate(some)}}
        found += [tuple(row) for row in transaction.connection.execute(of_names(len(some)), values)]
    return sorted(found, key=lambda row: row[:3])[:limit]


def _by_lease(
    transaction: Transaction, seqs: Sequence[int], leases: Mapping[str, timedelta]
) -> dict[timedelta, list[int]]:
    if len(set(leases.values())) == 1:
        return {next(iter(leases.values())): list(seqs)} if seqs else {}
    groups: dict[timedelta, list[int]] = {}
    for batch in batches(seqs):
        for seq, name in transaction.connection.execute(_NAMES, {"seqs": list(batch)}):
            groups.setdefault(leases[name] if name in leases else leases[ANY_NAME], []).append(seq)
    return groups


def _grant(transaction: Transaction, worker_id: str, lease: timedelta, seqs: Sequence[int]) -> Iterable[Claim]:
    secret = os.urandom(16)
    values = {"token": secret, "worker": worker_id, "lease_until": transaction.now + duration(lease)}
    for batch in batches(seqs):
        for row in transaction.connection.execute(_CLAIM, {**values, "seqs": list(batch)}):
            yield Claim(
                job_id=row.id,
                name=row.name,
                payload=row.payload,
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
            )


# Ordering keys

_UNHOLD = text(
    "WITH RECURSIVE names (name) AS ("
    "SELECT min(name) FROM workers_jobs WHERE queue = :queue AND state = 'held' AND ordering_key = :key"
    " UNION ALL SELECT (SELECT min(name) FROM workers_jobs WHERE queue = :queue AND state = 'held'"
    " AND ordering_key = :key AND name > names.name) FROM names WHERE name IS NOT NULL)"
    " UPDATE workers_jobs SET state = 'ready' WHERE seq IN (SELECT ("
    "SELECT seq FROM workers_jobs WHERE queue = :queue AND state = 'held' AND ordering_key = :key"
    " AND name = names.name ORDER BY priority, run_at, seq LIMIT 1) FROM names)"
)


def unhold(transaction: Transaction, keys: Iterable[str | None]) -> None:
    """Of each key the first held job of every name is ready."""
    distinct = {key for key in keys if key is not None}
    if distinct:
        rows = [{"queue": transaction.queue, "key": key} for key in distinct]
        transaction.connection.execute(_UNHOLD, rows)
        transaction.wake = True


# Leases

_HOLDERS = expanding(
    "SELECT seq, token, cancel_requested FROM workers_jobs"
    " WHERE queue = :queue AND state = 'processing' AND seq IN :seqs",
    "seqs",
)
_EXTEND = expanding("UPDATE workers_jobs SET lease_until = :lease_until WHERE seq IN :seqs", "seqs")
_STATES = expanding("SELECT id, state, expires_at FROM workers_jobs WHERE queue = :queue AND id IN :ids", "ids")
_EXPIRED = text(
    "SELECT seq, id, attempts, max_attempts, stalls, worker, keep_failed, ordering_key FROM workers_jobs"
    " WHERE queue = :queue AND state = 'processing' AND lease_until <= :now ORDER BY lease_until LIMIT :limit"
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
        for seq, secret, cancel_requested in rows:
            claim = asked.get((seq, secret))
            if claim is not None:
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
    return Renewal(
        lost={claim.token: reasons[claim.job_id] for claim in lost}, cancel_requested=frozenset(cancelled)
    )


def why_lost(transaction: Transaction, ids: Sequence[str]) -> dict[str, LossReason]:
    """Why a claim that does not hold its job any more lost it, by job id."""
    reasons = dict.fromkeys(ids, LossReason.NOT_FOUND)
    for batch in batches(list(reasons)):
        rows = transaction.connection.execute(_STATES, {"queue": transaction.queue, "ids": list(batch)})
        for job_id, state, expires_at in rows:
            if expires_at is None:
                reasons[job_id] = LossReason.TAKEN
            elif state != RowState.CANCELLED and expires_at > transaction.now:
                reasons[job_id] = LossReason.COMPLETED
    return reasons


def recover(transaction: Transaction, limit: int, *, max_stalls: int) -> Recovery:
    """See `Storage.recover`."""
    place = {"queue": transaction.queue, "now": transaction.now, "limit": limit}
    requeued, failed, dropped = [], [], []
    rows = transaction.connection.execute(_EXPIRED, place).all()
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
                "error": encode_error(
                    _stalled(row.worker, row.attempts, row.max_attempts, row.stalls + 1, max_stalls)
                ),
            }
            for row in failed
        ]
        transaction.connection.execute(_GIVE_UP, given_up)
    delete(transaction, [row.seq for row in dropped])
    unhold(transaction, [row.ordering_key for row in rows])
    transaction.announce(JobEventKind.QUEUED, [row.id for row in requeued])
    transaction.announce(JobEventKind.FAILED, [row.id for row in failed + dropped])
    return Recovery(
        requeued=tuple(row.id for row in requeued), failed=tuple(row.id for row in failed + dropped)
    )


def _stalled(worker: str, attempts: int, max_attempts: int, stalls: int, max_stalls: int) -> ErrorInfo:
    spent = f"attempt {attempts} of {max_attempts}, {stalls} lost leases ({max_stalls} allowed)"
    return ErrorInfo(
        type="StalledError",
        message=f"worker {worker!r} vanished or lost its lease: {spent}; look for what kills it, then retry the job",
        exhausted=attempts >= max_attempts,
    )


# Cancel

_FIND = text(
    "SELECT seq, state, expires_at, ordering_key FROM workers_jobs WHERE queue = :queue AND id = :id"
)
_BURY = text(
    "UPDATE workers_jobs SET state = 'cancelled', token = NULL, finished_at = :now, expires_at = :expires_at"
    " WHERE seq = :seq"
)
_REQUEST = text("UPDATE workers_jobs SET cancel_requested = 1 WHERE seq = :seq")


def cancel(transaction: Transaction, job_id: str) -> CancelResult:
    """See `Storage.cancel`. The row stays as the tombstone, without its payload."""
    row = transaction.connection.execute(_FIND, {"queue": transaction.queue, "id": job_id}).first()
    if row is None or (row.expires_at is not None and row.expires_at <= transaction.now):
        return CancelResult.NOT_FOUND
    if row.state == RowState.PROCESSING:
        transaction.connection.execute(_REQUEST, {"seq": row.seq})
        transaction.announce(JobEventKind.CANCEL_REQUESTED, [job_id])
        return CancelResult.PROCESSING
    if row.expires_at is not None:
        return CancelResult.NOT_FOUND if row.state == RowState.CANCELLED else CancelResult(row.state)
    until = transaction.now + duration(TOMBSTONE)
    transaction.connection.execute(_BURY, {"seq": row.seq, "now": transaction.now, "expires_at": until})
    transaction.connection.execute(_DELETE_PAYLOADS, {"seqs": [row.seq]})
    unhold(transaction, [row.ordering_key])
    transaction.announce(JobEventKind.CANCELLED, [job_id])
    return CancelResult.CANCELLED
