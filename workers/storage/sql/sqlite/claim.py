"""Claims: how jobs leave the queue for a worker, in order, which of them are held back, and how claims last.

Theory of operation. Of one ordering key at most one job is processing. The key's other jobs are set aside (`held`) when
a claim meets them, so that no claim reads past them twice. When a job of the key leaves the queue or stops processing,
the first held job of each name becomes ready again. So a key with held jobs always has one that is ready or processing.
Other keys are in `limits`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from typing import Final, TypeAlias

from sqlalchemy import TextClause, text

from workers.jobs import Claim, JobEventKind, ProgressReport, Renewal
from workers.storage.base import ANY_NAME
from workers.storage.sql.rows import (
    BATCH,
    Transaction,
    batches,
    claim_of,
    decode_token,
    duration,
    expanding,
)
from workers.storage.sql.sqlite.limits import ClaimLimits, is_limited
from workers.storage.sql.sqlite.limits import claimable_in as limits_claimable_in
from workers.storage.sql.steps.ends import why_lost

_NAMES_AT_ONCE: Final = 100
_ROUNDS: Final = 8
_WORKER_NOTED: Final = timedelta(seconds=1)

_STANDING = text(
    "SELECT paused, EXISTS (SELECT 1 FROM workers_gates WHERE queue = :queue)"
    " OR EXISTS (SELECT 1 FROM workers_limits WHERE queue = :queue) FROM workers_queues WHERE id = :queue"
)
_PROMOTE = text(
    "UPDATE workers_jobs SET state = 'ready' WHERE seq IN ("
    "SELECT seq FROM workers_jobs WHERE queue = :queue AND state IN ('scheduled', 'failing') AND run_at <= :now"
    " ORDER BY run_at LIMIT :limit)"
)
_IS_DUE = text(
    "SELECT 1 FROM workers_jobs WHERE queue = :queue AND state IN ('scheduled', 'failing') AND run_at <= :now LIMIT 1"
)
_OF_ANY_NAME = text(
    "SELECT priority, run_at, seq, ordering_key, name FROM workers_jobs WHERE queue = :queue AND state = 'ready'"
    " ORDER BY priority, run_at, seq LIMIT :limit"
)
_BUSY_KEYS = expanding(
    "SELECT ordering_key FROM workers_jobs WHERE queue = :queue AND state = 'processing' AND ordering_key IN :keys",
    "keys",
)
_HOLD = expanding("UPDATE workers_jobs SET state = 'held' WHERE seq IN :seqs", "seqs")
_NAMES = expanding("SELECT seq, name FROM workers_jobs WHERE seq IN :seqs", "seqs")
_CLAIM = expanding(
    "UPDATE workers_jobs SET state = 'processing', attempts = attempts + 1, token = :token, worker = :worker,"
    " lease_until = :lease_until,"
    " deduplication_key = CASE deduplication_mode WHEN 'debounce' THEN NULL ELSE deduplication_key END"
    " WHERE seq IN :seqs"
    " RETURNING seq, id, name, attempts, max_attempts, created_at, keep_completed, keep_failed, priority, backoff,"
    " chain_index, meta, error,"
    " (SELECT data FROM workers_payloads WHERE workers_payloads.seq = workers_jobs.seq) AS payload",
    "seqs",
)
_SEE = text(
    "INSERT INTO workers_seen (queue, worker, seen_at) VALUES (:queue, :worker, :now)"
    " ON CONFLICT (queue, worker) DO UPDATE SET seen_at = excluded.seen_at"
    " WHERE excluded.seen_at - workers_seen.seen_at >= :noted"
)


_Candidate: TypeAlias = tuple[int, int, int, str | None, str]
"""The priority, time, number, key and name of a job that is ready."""


@cache
def of_names(count: int) -> TextClause:
    """Select the first ready jobs of `count` names; SQLite merges the names' index ranges and stops at the limit."""
    of_one = (
        "SELECT priority, run_at, seq, ordering_key, name FROM workers_jobs WHERE queue = :queue AND state = 'ready'"
    )
    of_all = " UNION ALL ".join(of_one + " AND name = :name" + str(number) for number in range(count))
    return text(of_all + " ORDER BY priority, run_at, seq LIMIT :limit")


def claim(transaction: Transaction, worker_id: str, *, leases: Mapping[str, timedelta], limit: int) -> list[Claim]:
    """See `Storage.claim`."""
    see(transaction, [worker_id])
    bound = {"queue": transaction.queue}
    if limit < 1 or not leases:
        return []
    paused, limited = transaction.connection.execute(_STANDING, bound).one()
    if paused:
        return []
    promote_due(transaction, limit)
    if limited:
        limits = ClaimLimits(transaction)
        limits.open_what_is_due()
        limit = limits.room(limit)
    seqs = _take(transaction, leases, limit)
    if limited:
        limits.write_queue(len(seqs))
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
    """Note that the workers were seen just now, to the second, so that most claims need not write it."""
    noted = _WORKER_NOTED // timedelta(milliseconds=1)
    rows = [
        {"queue": transaction.queue, "worker": worker, "now": transaction.now, "noted": noted} for worker in workers
    ]
    if rows:
        transaction.connection.execute(_SEE, rows)


def promote_due(transaction: Transaction, limit: int) -> None:
    """Make due jobs ready: at least `limit` of them, in the order in which they became due."""
    bound = {"queue": transaction.queue, "now": transaction.now}
    if transaction.connection.execute(_IS_DUE, bound).first() is not None:
        transaction.connection.execute(_PROMOTE, {**bound, "limit": max(limit, 2 * BATCH)})


def _take(transaction: Transaction, names: Iterable[str], limit: int) -> list[int]:
    """Take up to `limit` ready jobs in order, and hold those whose ordering key is busy.

    No two of those taken have the same ordering key. A long run of held jobs ends the search early; the next claim goes
    on behind them.
    """
    taken: list[int] = []
    keys: set[str] = set()
    wanted = list(names)
    limits: ClaimLimits | None = None
    rounds = _ROUNDS
    while rounds:
        candidates = _candidates(transaction, wanted, limit if not keys and limits is None else limit + BATCH)
        if limits is None and any(row[3] is not None and is_limited(row[3]) for row in candidates):
            limits = ClaimLimits(transaction)
        fresh = [row for row in candidates if row[2] not in taken]
        held = _sort_out(transaction, fresh, taken, keys, limit, limits)
        for batch in batches(held):
            transaction.connection.execute(_HOLD, {"seqs": list(batch)})
        came_up = limits is not None and limits.come_up(limit - len(taken))
        if len(taken) < limit and (came_up or held):
            rounds -= not came_up
        elif limits is None or not limits.looks_on():
            break
    return taken


def _sort_out(
    transaction: Transaction,
    candidates: Sequence[_Candidate],
    taken: list[int],
    keys: set[str],
    limit: int,
    limits: ClaimLimits | None,
) -> list[int]:
    """Return the candidates to hold; the others are added to `taken`, up to `limit`.

    `keys` are those known to be busy; more are added here.
    """
    unknown = {key for _, _, _, key, _ in candidates if key is not None and not is_limited(key)} - keys
    for batch in batches(list(unknown)):
        busy = transaction.connection.execute(_BUSY_KEYS, {"queue": transaction.queue, "keys": list(batch)})
        keys.update(busy.scalars())
    held: list[int] = []
    for _, _, seq, key, name in candidates:
        if key is not None and limits is not None and is_limited(key):
            if len(taken) >= limit and not limits.was_served(key, name):
                continue
            (taken if limits.passes(seq, key, name) else held).append(seq)
        elif key is not None and key in keys:
            held.append(seq)
        elif len(taken) < limit:
            taken.append(seq)
            if key is not None:
                keys.add(key)
    return held


def _candidates(transaction: Transaction, names: Sequence[str], limit: int) -> list[_Candidate]:
    bound = {"queue": transaction.queue, "limit": limit}
    if ANY_NAME in names:
        return [tuple(row) for row in transaction.connection.execute(_OF_ANY_NAME, bound)]
    found: list[_Candidate] = []
    for start in range(0, len(names), _NAMES_AT_ONCE):
        some = names[start : start + _NAMES_AT_ONCE]
        values = {**bound, **{"name" + str(n): name for n, name in enumerate(some)}}
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
            yield claim_of(row, job_id=row.id, name=row.name, secret=secret, worker_id=worker_id, lease=lease)


# `priority >= -1000` is always true, but makes the planner choose the right index.
_HAS_READY = text("SELECT 1 FROM workers_jobs WHERE queue = :queue AND state = 'ready' AND priority >= -1000 LIMIT 1")
_HAS_READY_OF = expanding(
    "SELECT 1 FROM workers_jobs WHERE queue = :queue AND state = 'ready' AND name IN :names LIMIT 1", "names"
)
_NEXT_DUE = text(
    "SELECT run_at FROM workers_jobs WHERE queue = :queue AND state IN ('scheduled', 'failing') ORDER BY run_at LIMIT 1"
)


def claimable_in(transaction: Transaction, names: Collection[str]) -> timedelta | None:
    """Return how long until a claim for `names` may succeed, 0 for now; None while there is nothing to wait for.

    A delayed job of another name counts too: the claim that it causes makes it ready, so it causes no second one.
    """
    connection, bound = transaction.connection, {"queue": transaction.queue}
    paused, limited = connection.execute(_STANDING, bound).one()
    if paused:
        return None
    if ANY_NAME in names:
        ready = connection.execute(_HAS_READY, bound).first()
    else:
        ready = connection.execute(_HAS_READY_OF, {**bound, "names": list(names)}).first()
    opens = limits_claimable_in(transaction, ready is not None) if limited else None
    if (ready is not None and not limited) or opens == timedelta(0):
        return timedelta(0)
    due = connection.execute(_NEXT_DUE, bound).scalar()
    until_due = None if due is None else max(0, due - transaction.now) * timedelta(milliseconds=1)
    return opens if until_due is None else until_due if opens is None else min(opens, until_due)


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
        bound = {"queue": transaction.queue, "seq": seq, "id": report.claim.job_id, "token": secret}
        if transaction.connection.execute(_REPORT, {**bound, "progress": report.value}).rowcount:
            transaction.announce(JobEventKind.PROGRESS, [report.claim.job_id])
