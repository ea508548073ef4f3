"""What recurs in a queue: the steps that both databases share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlalchemy import text

from workers.jobs import CronLook, CronRow, NewJob
from workers.storage.rules import CRONS_AT_ONCE
from workers.storage.sql.rows import Transaction, milliseconds, moment

_ALL = text("SELECT name, revision, due, body FROM workers_crons WHERE queue = :queue ORDER BY name")
_DUE = text(
    "SELECT name, revision, due, body FROM workers_crons WHERE queue = :queue AND due <= :now"
    " ORDER BY due, name LIMIT :limit"
)
_NEXT_DUE = text("SELECT min(due) FROM workers_crons WHERE queue = :queue AND due IS NOT NULL")
_ADD = text(
    "INSERT INTO workers_crons (queue, name, revision, due, body) VALUES (:queue, :name, :revision, :due, :body)"
    " ON CONFLICT (queue, name) DO NOTHING"
)
_REPLACE = text(
    "UPDATE workers_crons SET revision = :revision, due = :due, body = :body"
    " WHERE queue = :queue AND name = :name AND revision = :revision - 1"
)


def crons(transaction: Transaction, due: bool) -> CronLook:
    """See `KeepsCrons.crons`."""
    bound = {"queue": transaction.queue, "now": transaction.now, "limit": CRONS_AT_ONCE}
    found = transaction.connection.execute(_DUE if due else _ALL, bound).all()
    rows = [
        CronRow(
            name=transaction.decode(row.name),
            revision=row.revision,
            due=None if row.due is None else moment(row.due),
            body=transaction.decode(row.body),
        )
        for row in found
    ]
    next_due = transaction.connection.execute(_NEXT_DUE, bound).scalar()
    return CronLook(now=moment(transaction.now), rows=rows, next_due=None if next_due is None else moment(next_due))


def replace_cron(
    transaction: Transaction,
    row: CronRow,
    jobs: Sequence[NewJob],
    enqueue: Callable[[Transaction, Sequence[NewJob]], object],
) -> bool:
    """See `KeepsCrons.replace_cron`; `enqueue` is the database's step."""
    values = {
        "queue": transaction.queue,
        "name": transaction.encode(row.name),
        "revision": row.revision,
        "due": None if row.due is None else milliseconds(row.due),
        "body": transaction.encode(row.body),
    }
    changed = transaction.connection.execute(_ADD if row.revision == 1 else _REPLACE, values).rowcount
    if changed and jobs:
        enqueue(transaction, jobs)
    return bool(changed)
