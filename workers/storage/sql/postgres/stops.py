"""The end of attempts whose job was cancelled, on PostgreSQL.

Not by `workers_settle`, which every job pays for: the few that end so take some statements more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import RowMapping, text

from workers.jobs import Cancelled, JobEventKind, Settlement, SettleOutcome, SettleStatus
from workers.storage.sql.rows import RowState, Transaction, batches, decode_token, encode_retention, expanding
from workers.storage.sql.steps.dependents import tell_end
from workers.storage.sql.steps.ends import delete, unhold

_APPLIED: Final = SettleOutcome(status=SettleStatus.APPLIED)

_LOCK_KEYS = text("SELECT workers_lock_keys(:queue, CAST(:seqs AS bigint[]))")
_LOCK_ROWS = expanding("SELECT seq FROM workers_jobs WHERE seq IN :seqs ORDER BY seq FOR UPDATE", "seqs")
_HELD = expanding(
    "SELECT seq, id, token, keep_failed, ordering_key, dependents FROM workers_jobs"
    " WHERE seq IN :seqs AND queue = :queue AND state = 'processing'",
    "seqs",
)
_STOP = text(
    "UPDATE workers_jobs SET state = 'cancelled', worker = NULL, lease_until = NULL, cancel_requested = 0,"
    " finished_at = :now, expires_at = :expires_at WHERE seq = :seq"
)


def lock(transaction: Transaction, settlements: Sequence[Settlement]) -> None:
    """Take the locks of all these settlements, in the order in which everybody takes them: keys, then rows."""
    seqs = sorted({decode_token(settlement.claim.token)[0] for settlement in settlements})
    transaction.connection.execute(_LOCK_KEYS, {"queue": transaction.queue, "seqs": seqs})
    for batch in batches(seqs):
        transaction.connection.execute(_LOCK_ROWS, {"seqs": list(batch)})


def stop(transaction: Transaction, settlements: Sequence[Cancelled]) -> dict[str, SettleOutcome]:
    """Cancel the jobs whose claim still holds them, and return the outcomes of those, by token."""
    held = _held(transaction, settlements)
    applied = [
        (settlement, held[settlement.claim.token]) for settlement in settlements if settlement.claim.token in held
    ]
    ended, dropped = [], []
    for settlement, row in applied:
        keep = row["keep_failed"] if settlement.keep is None else encode_retention(settlement.keep)
        if keep is None:
            dropped.append(row["seq"])
            if row["dependents"]:
                tell_end(transaction, row["id"], RowState.CANCELLED)
        else:
            ended.append({"seq": row["seq"], "now": transaction.now, "expires_at": transaction.now + keep})
    if ended:
        transaction.connection.execute(_STOP, ended)
    delete(transaction, dropped)
    unhold(transaction, [row["ordering_key"] for _, row in applied])
    transaction.announce(JobEventKind.CANCELLED, [settlement.claim.job_id for settlement, _ in applied])
    return {settlement.claim.token: _APPLIED for settlement, _ in applied}


def _held(transaction: Transaction, settlements: Sequence[Cancelled]) -> dict[str, RowMapping]:
    """Return the rows of the claims that hold their job, by token."""
    rows: dict[int, RowMapping] = {}
    tokens = {settlement.claim.token: decode_token(settlement.claim.token) for settlement in settlements}
    for batch in batches([seq for seq, _ in tokens.values()]):
        bound = {"queue": transaction.queue, "seqs": list(batch)}
        rows.update((row["seq"], row) for row in transaction.connection.execute(_HELD, bound).mappings())
    held = {}
    for settlement in settlements:
        claim = settlement.claim
        seq, secret = tokens[claim.token]
        row = rows.get(seq)
        if row is not None and row["token"] == secret and transaction.decode(row["id"]) == claim.job_id:
            held[claim.token] = row
    return held
