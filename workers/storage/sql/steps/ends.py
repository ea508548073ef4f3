"""Steps that both databases share as a job leaves its worker or the queue, and recovery of those whose lease ran out.

A job that leaves frees the first held job of its ordering key (`sqlite.claim` says how jobs come to be held). A claim
that no longer holds its job is told why.

The column of a job's failed attempts is written by a statement of its own before the settlement, in the same
transaction. Few attempts fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from sqlalchemy import Row, text

from workers.checks import LONGEST_LEASE
from workers.errors import LossReason
from workers.jobs import (
    SILENT_AFTER,
    UNCOUNTED_RETRIES,
    Claim,
    ErrorInfo,
    JobEventKind,
    Recovery,
    Retried,
    Settlement,
    SettleOutcome,
    SettleStatus,
)
from workers.limits import FAIR_MARK
from workers.storage.failures import lost_attempt, noted_failure, with_failure
from workers.storage.rules import stalled_error
from workers.storage.sql.rows import (
    SKIP,
    WAIT,
    RowState,
    Transaction,
    batches,
    decode_token,
    duration,
    encode_error,
    expanding,
    locking,
    moment,
)
from workers.storage.sql.steps.dependents import tell_end

_ALREADY_APPLIED: Final = SettleOutcome(status=SettleStatus.ALREADY_APPLIED)

_DELETE = expanding("DELETE FROM workers_jobs WHERE seq IN :seqs", "seqs")
_DELETE_PAYLOADS = expanding("DELETE FROM workers_payloads WHERE seq IN :seqs", "seqs")
_FIRST_HELD: Final = (
    "WITH RECURSIVE names (name) AS ("
    "SELECT min(name) FROM workers_jobs WHERE queue = :queue AND state = 'held' AND ordering_key = :key"
    " UNION ALL SELECT (SELECT min(name) FROM workers_jobs WHERE queue = :queue AND state = 'held'"
    " AND ordering_key = :key AND name > names.name) FROM names WHERE name IS NOT NULL)"
    " UPDATE workers_jobs SET state = 'ready' WHERE seq IN (SELECT ("
    "SELECT seq FROM workers_jobs WHERE queue = :queue AND state = 'held' AND ordering_key = :key"
    " AND name = names.name ORDER BY priority, run_at, seq LIMIT 1) FROM names"
)
_UNHOLD = text(_FIRST_HELD + ")")
# Of a fair key only names whose front is not ready.
_WITHOUT_FRONT: Final = (
    " WHERE NOT EXISTS (SELECT 1 FROM workers_gates g JOIN workers_jobs j ON j.seq = g.front AND j.state = 'ready'"
    " WHERE g.queue = :queue AND g.gate = :key AND g.name = names.name)"
)
_UNHOLD_FAIR = text(_FIRST_HELD + _WITHOUT_FRONT + ")")
_UNHOLD_POSTGRES: Final = text("SELECT workers_unhold(:queue, CAST(:keys AS text[]))")
_EXPIRIES = expanding("SELECT id, expires_at FROM workers_jobs WHERE queue = :queue AND id IN :ids", "ids")
_SETTLED_BY = expanding(
    "SELECT id, token FROM workers_jobs WHERE queue = :queue AND id IN :ids AND state <> 'processing'"
    " AND token IS NOT NULL",
    "ids",
)


def delete(transaction: Transaction, seqs: Sequence[int]) -> None:
    """Delete the jobs without a trace."""
    for batch in batches(seqs):
        transaction.connection.execute(_DELETE, {"seqs": list(batch)})
        transaction.connection.execute(_DELETE_PAYLOADS, {"seqs": list(batch)})


def unhold(transaction: Transaction, keys: Iterable[str | None]) -> None:
    """Make the first held job of every name ready, for each of the keys."""
    distinct = {key for key in keys if key is not None}
    if not distinct:
        return
    transaction.wake = True
    if transaction.dialect == "postgresql":
        transaction.connection.execute(_UNHOLD_POSTGRES, {"queue": transaction.queue, "keys": list(distinct)})
    else:
        for statement, fair in ((_UNHOLD, False), (_UNHOLD_FAIR, True)):
            some = [{"queue": transaction.queue, "key": key} for key in distinct if key.startswith(FAIR_MARK) is fair]
            if some:
                transaction.connection.execute(statement, some)


def why_lost(transaction: Transaction, ids: Sequence[str]) -> dict[str, LossReason]:
    """Return, by job id, why a claim no longer holds its job."""
    reasons = dict.fromkeys(ids, LossReason.NOT_FOUND)
    for batch in batches([transaction.encode(job_id) for job_id in reasons]):
        rows = transaction.connection.execute(_EXPIRIES, {"queue": transaction.queue, "ids": list(batch)})
        for encoded, expires_at in rows:
            job_id = transaction.decode(encoded)
            if expires_at is None:
                reasons[job_id] = LossReason.TAKEN
            elif expires_at > transaction.now:
                reasons[job_id] = LossReason.COMPLETED
    return reasons


def outcomes_by_id(transaction: Transaction, claims: Sequence[Claim]) -> dict[str, SettleOutcome]:
    """Return, by token, the outcomes of claims whose token leads to no job of theirs."""
    before = _continued(transaction, claims)
    reasons = why_lost(transaction, [claim.job_id for claim in claims if claim.token not in before])
    return {
        claim.token: _ALREADY_APPLIED
        if claim.token in before
        else SettleOutcome(status=SettleStatus.LOST, reason=reasons[claim.job_id])
        for claim in claims
    }


def _continued(transaction: Transaction, claims: Sequence[Claim]) -> set[str]:
    """Return the tokens that settled their job as one that goes on: since then its row has another number."""
    settled_by: dict[str, bytes] = {}
    for batch in batches([transaction.encode(claim.job_id) for claim in claims]):
        rows = transaction.connection.execute(_SETTLED_BY, {"queue": transaction.queue, "ids": list(batch)})
        settled_by.update((transaction.decode(job_id), token) for job_id, token in rows)
    return {claim.token for claim in claims if settled_by.get(claim.job_id) == decode_token(claim.token)[1]}


_HELD = locking(
    "SELECT seq, id, token, uncounted, failures FROM workers_jobs"
    " WHERE seq IN :seqs AND +queue = :queue AND state = 'processing'",
    WAIT,
    lists="seqs",
)
_NOTE = text("UPDATE workers_jobs SET failures = :failures WHERE seq = :seq")


def fails(settlement: Settlement) -> bool:
    """Tell whether the settlement may be that of an attempt to note."""
    return noted_failure(settlement) is not None


def note_failures(transaction: Transaction, settlements: Sequence[Settlement]) -> None:
    """Note the attempts that fail and count, of claims that hold their job. The caller has locked the rows."""
    failing = {settlement.claim.token: settlement for settlement in settlements if fails(settlement)}
    by_seq = {decode_token(token)[0]: settlement for token, settlement in failing.items()}
    changes = []
    for batch in batches(list(by_seq)):
        bound = {"queue": transaction.queue, "seqs": list(batch)}
        for row in transaction.connection.execute(_HELD[transaction.dialect], bound):
            settlement = by_seq[row.seq]
            claim = settlement.claim
            holds = row.token == decode_token(claim.token)[1] and transaction.decode(row.id) == claim.job_id
            if holds and _counts(settlement, row.uncounted):
                failures = with_failure(row.failures, noted_failure(settlement), moment(transaction.now))
                changes.append({"seq": row.seq, "failures": failures})
    if changes:
        transaction.connection.execute(_NOTE, changes)


def _counts(settlement: Settlement, uncounted: int) -> bool:
    return not isinstance(settlement, Retried) or settlement.counted or uncounted >= UNCOUNTED_RETRIES


_EXPIRED = text(
    "SELECT seq, ordering_key FROM workers_jobs"
    " WHERE queue = :queue AND state = 'processing' AND lease_until <= :now ORDER BY lease_until LIMIT :limit"
)
_AHEAD = locking(
    "SELECT seq FROM workers_jobs"
    " WHERE queue = :queue AND state = 'processing' AND lease_until > :latest ORDER BY lease_until LIMIT :limit",
    SKIP,
)
_SHORTENED = text("UPDATE workers_jobs SET lease_until = :soon WHERE seq = :seq")
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
    _believe_no_lease_from_ahead(transaction, limit)
    bound = {"queue": transaction.queue, "now": transaction.now, "limit": limit}
    requeued, failed, dropped = [], [], []
    rows = _stalled_rows(transaction, transaction.connection.execute(_EXPIRED, bound).all())
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
        bound = {"seqs": list(batch), "now": transaction.now}
        rows += transaction.connection.execute(_STALLED[transaction.dialect], bound)
    return rows


def _believe_no_lease_from_ahead(transaction: Transaction, limit: int) -> None:
    """Shorten leases that end later than any may: a clock that was ahead gave them, and nobody may renew them."""
    bound = {"queue": transaction.queue, "latest": transaction.now + duration(LONGEST_LEASE), "limit": limit}
    soon = transaction.now + duration(SILENT_AFTER)
    rows = transaction.connection.execute(_AHEAD[transaction.dialect], bound).all()
    if rows:
        transaction.connection.execute(_SHORTENED, [{"seq": row.seq, "soon": soon} for row in rows])


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
