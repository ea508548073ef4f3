"""The column in which a job's failed attempts are kept, on both databases.

It is written by a statement of its own before the settlement, in the same transaction, because few attempts fail.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import text

from workers.jobs import UNCOUNTED_RETRIES, Retried, Settlement
from workers.storage.failures import noted_failure, with_failure
from workers.storage.sql.rows import WAIT, Transaction, batches, decode_token, locking, moment

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
        place = {"queue": transaction.queue, "seqs": list(batch)}
        for row in transaction.connection.execute(_HELD[transaction.dialect], place):
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
