"""Steps that both databases share as a job leaves its worker or the queue.

A job that leaves frees the first held job of its ordering key (`sqlite.claim` says how jobs come to be held). A claim
that no longer holds its job is told why.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from sqlalchemy import text

from workers.errors import LossReason
from workers.gates import FAIR_MARK
from workers.jobs import Claim, SettleOutcome, SettleStatus
from workers.storage.sql.rows import Transaction, batches, decode_token, expanding

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
