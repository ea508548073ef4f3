"""Reading of jobs and workers, and the removal of records whose retention is over."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import RowMapping, text

from workers.jobs import JobOutcome, JobRecord, JobState, JobStatus, OutcomeKind, Page, WorkerInfo
from workers.metadata import decode_meta
from workers.storage.failures import decode_failures
from workers.storage.rules import WORKER_RECORD, read_cursor
from workers.storage.sql.rows import (
    SKIP,
    RowState,
    Transaction,
    batches,
    decode_error,
    duration,
    expanding,
    locking,
    moment,
    optional_moment,
    public_state,
)
from workers.storage.sql.steps.ends import delete
from workers.storage.sql.steps.enqueue import sweep_keys
from workers.storage.sql.steps.limits import sweep_buckets

EVENTS_KEPT: Final = timedelta(minutes=1)
"""How long SQLite's event log keeps an event for processes that have yet to look."""

_DELAYED = (JobState.SCHEDULED, JobState.FAILING)
_COLUMNS = (
    "SELECT seq, id, name, state, attempts, max_attempts, created_at, priority, run_at, finished_at, worker, error,"
    " progress, chain_index, CASE state WHEN 'waiting' THEN (SELECT count(*) FROM workers_dependencies"
    " WHERE dependent = workers_jobs.seq) ELSE 0 END AS waits_for"
)
_OF_QUEUE = " FROM workers_jobs WHERE queue = :queue"
_AMONG = _OF_QUEUE + " AND id IN :ids AND (expires_at IS NULL OR expires_at > :now)"
_STATUS = expanding(_COLUMNS + _AMONG, "ids")
_DATA = ", meta, failures, (SELECT data FROM workers_payloads WHERE workers_payloads.seq = workers_jobs.seq) AS data"
_RECORD = expanding(_COLUMNS + _DATA + _AMONG, "ids")
_ENDED_WITH: Final = (
    "SELECT state, error, (SELECT data FROM workers_payloads WHERE workers_payloads.seq = workers_jobs.seq) AS data"
    " FROM workers_jobs WHERE queue = :queue AND id = :id AND expires_at > "
)
_OUTCOME = text(_ENDED_WITH + ":now")
# Every waiter asks, and the clock would cost him a query of its own.
_OUTCOME_POSTGRES = text(_ENDED_WITH + "workers_now()")

# Each condition contains that of the partial index that is to serve it, and a term on one of the index's columns. The
# term is always true, but without it the planner prefers the unique index on queue and id.
_DELAYED_STATES = "state IN ('scheduled', 'failing')"
_READY = "state = 'ready' AND priority >= -1000"
_HELD = "state = 'held' AND ordering_key >= ''"
_PROCESSING = "state = 'processing' AND lease_until >= 0"
_CONDITIONS: Final = {
    JobState.QUEUED: (_READY, _HELD, _DELAYED_STATES + " AND run_at <= :now"),
    JobState.SCHEDULED: (_DELAYED_STATES + " AND state = 'scheduled' AND run_at > :now",),
    JobState.FAILING: (_DELAYED_STATES + " AND state = 'failing' AND run_at > :now",),
    JobState.WAITING: ("state = 'waiting' AND run_at >= 0",),
    JobState.PROCESSING: (_PROCESSING,),
    JobState.COMPLETED: ("state = 'completed' AND expires_at > :now",),
    JobState.FAILED: ("state = 'failed' AND expires_at > :now",),
    JobState.CANCELLED: ("state = 'cancelled' AND expires_at > :now",),
}


# One statement, so that a job that changes its state meanwhile is counted exactly once.
_COUNTS = text(
    " UNION ALL ".join(
        f"SELECT '{state.value}' AS state, count(*) AS jobs FROM workers_jobs WHERE queue = :queue AND {condition}"  # noqa: S608 - our own text
        for state, conditions in _CONDITIONS.items()
        for condition in conditions
    )
)
_LIST, _LIST_NAMED = (
    {
        state: [
            text(f"{_COLUMNS}{_OF_QUEUE} AND seq > :seq AND {condition}{named} ORDER BY seq LIMIT :limit")
            for condition in conditions
        ]
        for state, conditions in _CONDITIONS.items()
    }
    for named in ("", " AND name = :name")
)

# The first of each priority, each found by the index of its own.
_SINCE = text(
    "WITH RECURSIVE used (priority) AS ("
    "SELECT min(priority) FROM workers_jobs WHERE queue = :queue AND state = 'ready'"
    " UNION ALL SELECT (SELECT min(priority) FROM workers_jobs WHERE queue = :queue AND state = 'ready'"
    " AND priority > used.priority) FROM used WHERE used.priority IS NOT NULL)"
    " SELECT min(since) FROM (SELECT (SELECT min(run_at) FROM workers_jobs WHERE queue = :queue AND state = 'ready'"
    " AND priority = used.priority) AS since FROM used WHERE used.priority IS NOT NULL"
    " UNION ALL SELECT min(run_at) FROM workers_jobs"
    " WHERE queue = :queue AND state IN ('scheduled', 'failing') AND run_at <= :now) AS firsts"
)
_CLAIMS = text(
    "SELECT worker, count(*) AS claims FROM workers_jobs WHERE queue = :queue AND state = 'processing'"
    " AND lease_until >= 0 GROUP BY worker"
)
_SEEN = text("SELECT worker, seen_at FROM workers_seen WHERE queue = :queue ORDER BY worker")

_ENDED = locking(
    "SELECT seq FROM workers_jobs WHERE queue = :queue AND state = :state AND expires_at <= :now"
    " ORDER BY expires_at LIMIT :limit",
    SKIP,
)
_GONE = text("DELETE FROM workers_seen WHERE queue = :queue AND worker = :worker")
_UNSEEN = text(
    "DELETE FROM workers_seen WHERE queue = :queue AND worker IN ("
    "SELECT worker FROM workers_seen WHERE queue = :queue AND seen_at <= :before"
    " AND worker NOT IN (SELECT worker FROM workers_jobs WHERE queue = :queue AND state = 'processing'"
    " AND lease_until >= 0) LIMIT :limit)"
)
_OLD_LISTENERS = text("DELETE FROM workers_listeners WHERE expires_at <= :now")
_OLD_EVENTS = text(
    "DELETE FROM workers_events WHERE seq IN (SELECT seq FROM workers_events WHERE seq <="
    " (SELECT coalesce(max(seq), 0) FROM workers_events WHERE at <= :before) ORDER BY seq LIMIT :limit)"
)


def status(transaction: Transaction, ids: Sequence[str]) -> list[JobStatus | None]:
    """See `Storage.status`."""
    found: dict[str, JobStatus] = {}
    for batch in batches([transaction.encode(job_id) for job_id in ids]):
        bound = {"queue": transaction.queue, "now": transaction.now, "ids": list(batch)}
        for row in transaction.connection.execute(_STATUS, bound).mappings():
            status = _status(row, transaction)
            found[status.id] = status
    return [found.get(job_id) for job_id in ids]


def _status(row: RowMapping, transaction: Transaction) -> JobStatus:
    state = public_state(row["state"], row["run_at"], transaction.now)
    return JobStatus(
        id=transaction.decode(row["id"]),
        name=transaction.decode(row["name"]),
        state=state,
        attempt=row["attempts"],
        max_attempts=row["max_attempts"],
        created_at=moment(row["created_at"]),
        priority=row["priority"],
        chain_index=row["chain_index"],
        next_run_at=moment(row["run_at"]) if state in _DELAYED else None,
        finished_at=optional_moment(row["finished_at"]),
        worker_id=None if row["worker"] is None else transaction.decode(row["worker"]),
        last_error=decode_error(row["error"]),
        encoded_progress=row["progress"],
        waits_for=row["waits_for"],
    )


def read(transaction: Transaction, ids: Sequence[str]) -> list[JobRecord | None]:
    """See `Storage.read`."""
    found: dict[str, JobRecord] = {}
    for batch in batches([transaction.encode(job_id) for job_id in ids]):
        bound = {"queue": transaction.queue, "now": transaction.now, "ids": list(batch)}
        for row in transaction.connection.execute(_RECORD, bound).mappings():
            status = _status(row, transaction)
            completed = status.state is JobState.COMPLETED  # its result has taken the place of the payload
            found[status.id] = JobRecord(
                status=status,
                payload=None if completed else row["data"],
                result=row["data"] if completed else None,
                failures=decode_failures(row["failures"]),
                meta=decode_meta(row["meta"]) if row["meta"] else {},
            )
    return [found.get(job_id) for job_id in ids]


def result(transaction: Transaction, job_id: str) -> JobOutcome | None:
    """See `Storage.result`."""
    bound = {"queue": transaction.queue, "id": transaction.encode(job_id)}
    if transaction.dialect == "postgresql":
        row = transaction.connection.execute(_OUTCOME_POSTGRES, bound).first()
    else:
        row = transaction.connection.execute(_OUTCOME, {**bound, "now": transaction.now}).first()
    if row is None:
        return None
    if row.state == RowState.COMPLETED:
        return JobOutcome(kind=OutcomeKind.COMPLETED, result=row.data)
    if row.state == RowState.FAILED:
        return JobOutcome(kind=OutcomeKind.FAILED, error=decode_error(row.error))
    return JobOutcome(kind=OutcomeKind.CANCELLED)


def counts(transaction: Transaction) -> dict[JobState, int]:
    """See `Storage.counts`."""
    bound = {"queue": transaction.queue, "now": transaction.now}
    found = dict.fromkeys(JobState, 0)
    for state, jobs in transaction.connection.execute(_COUNTS, bound):
        found[JobState(state)] += jobs
    return found


def page(transaction: Transaction, state: JobState, name: str | None, cursor: str | None, limit: int) -> Page:
    """See `ListsInOrder.list_in_order`."""
    seq, statements = read_cursor(cursor), _LIST[state]
    bound: dict[str, object] = {
        "queue": transaction.queue,
        "now": transaction.now,
        "seq": seq,
        "limit": limit + 1,
    }
    if name is not None:
        statements, bound["name"] = _LIST_NAMED[state], transaction.encode(name)
    rows = [row for statement in statements for row in transaction.connection.execute(statement, bound).mappings()]
    rows.sort(key=lambda row: int(row["seq"]))
    more = len(rows) > limit
    rows = rows[:limit]
    return Page(
        jobs=tuple(_status(row, transaction) for row in rows),
        cursor=str(rows[-1]["seq"]) if more and rows else None,
    )


def waiting_since(transaction: Transaction) -> datetime | None:
    """See `Storage.waiting_since`."""
    bound = {"queue": transaction.queue, "now": transaction.now}
    return optional_moment(transaction.connection.execute(_SINCE, bound).scalar())


def workers(transaction: Transaction) -> list[WorkerInfo]:
    """See `Storage.workers`."""
    bound = {"queue": transaction.queue}
    claims = {row.worker: row.claims for row in transaction.connection.execute(_CLAIMS, bound)}
    return [
        WorkerInfo(id=transaction.decode(worker), seen_at=moment(seen_at), claims=claims.get(worker, 0))
        for worker, seen_at in transaction.connection.execute(_SEEN, bound)
    ]


def farewell(transaction: Transaction, worker_id: str) -> None:
    """See `TakesLeave.farewell`."""
    bound = {"queue": transaction.queue, "worker": transaction.encode(worker_id)}
    transaction.connection.execute(_GONE, bound)


def sweep(transaction: Transaction, limit: int) -> int:
    """See `Storage.sweep`. Events that no process needs any more are removed too, uncounted."""
    connection, bound = transaction.connection, {"queue": transaction.queue, "now": transaction.now}
    left = limit
    transaction.ends = True  # statements of others may have ended some
    for state in (RowState.COMPLETED, RowState.FAILED, RowState.CANCELLED):
        ended = (
            connection.execute(_ENDED[transaction.dialect], {**bound, "state": state.value, "limit": left})
            .scalars()
            .all()
        )
        delete(transaction, ended)
        left -= len(ended)
    left -= sweep_keys(transaction, left)
    left -= sweep_buckets(transaction, left)
    before = transaction.now - duration(WORKER_RECORD)
    left -= connection.execute(_UNSEEN, {"queue": transaction.queue, "before": before, "limit": left}).rowcount
    connection.execute(_OLD_LISTENERS, {"now": transaction.now})
    if transaction.dialect == "sqlite":  # PostgreSQL carries events itself
        connection.execute(_OLD_EVENTS, {"before": transaction.now - duration(EVENTS_KEPT), "limit": 10 * limit})
    return limit - left
