"""Jobs that follow others: how they come to wait, and on SQLite how they are released.

Theory of operation. `workers_dependencies` has a row for each job that a waiting one still follows. The rows of jobs
that are followed are marked (`dependents`), so that jobs which nobody follows cost nothing. Triggers of the database
see each end of a marked job, whichever statement makes it. On PostgreSQL they release the dependents at once
(`postgres/dependents.sql`). On SQLite, where times and events are ours, they note the end in the rows, and `resolve`
does the rest before the transaction commits. What somebody else's statement ended is resolved by the next sweep.

A row that vanishes with its end, because nothing of it is kept, looks removed to a trigger. So `tell_end` comes first.

Each dependent gets a copy of how it ended in `workers_outcomes`, which the job can read. It is made in the step that
ends the other job, or by the enqueue if that had ended before. So nothing that becomes of its record takes it away. On
PostgreSQL `workers_release` makes those of the first kind. A result is in the place of the payload before anybody is
told of the end. The rows of jobs that follow others, or did, are marked (`follows`): with those alone a trigger deletes
the copies, however the row goes.

`queue` and `job_id` of a dependency are those of the job that is followed. Its dependents may be in any queue of the
database: each is released by the step that ends the job, and its own queue's workers and subscribers are told.

While a job waits, its `run_at` is its delay after `created_at`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final, NamedTuple, TypeAlias

from sqlalchemy import RowMapping, TextClause, text

from workers.errors import UnknownDependency
from workers.jobs import (
    AfterFailure,
    ErrorInfo,
    JobEventKind,
    JobOutcome,
    JobRef,
    JobState,
    NewJob,
    OutcomeKind,
)
from workers.storage.rules import COPIED_BYTES, bounded_count, dependency_error
from workers.storage.sql.rows import (
    WAIT,
    RowState,
    Transaction,
    batches,
    decode_error,
    duration,
    encode_error,
    encode_retention,
    expanding,
    locking,
)

REMOVED: Final = "removed"
"""The end of a job of which there is no record."""

_WIPE = expanding("DELETE FROM workers_outcomes WHERE queue = :queue AND job_id IN :ids", "ids")
_BEGIN = expanding("UPDATE workers_jobs SET follows = 1 WHERE seq IN :seqs", "seqs")
_LEARN: Final = "INSERT INTO workers_outcomes (queue, job_id, other_queue, other_id, ended, error, result)"
_LEARN_AT_ONCE = text(
    _LEARN + " VALUES (:queue, :job_id, :other_queue, :other_id, :ended, :error, "  # noqa: S608 - our own text
    "(SELECT data FROM workers_payloads WHERE seq = :seq AND length(data) <= :most))"
)
_RESULT: Final = (
    " (SELECT p.data FROM workers_jobs o JOIN workers_payloads p ON p.seq = o.seq WHERE o.queue = d.queue"
    " AND o.id = d.job_id AND length(p.data) <= :most AND "
)
_OF: Final = (
    " FROM workers_dependencies d JOIN workers_jobs j ON j.seq = d.dependent JOIN workers_queues q ON q.id = d.queue"
    " WHERE d.queue = :queue AND d.job_id = :job_id AND "
)
# What `learn_last` has told is told better there: by now the row may be gone.
_LEARN_END = text(
    _LEARN
    + " SELECT j.queue, j.id, q.name, d.job_id, d.ended, d.error,"
    + _RESULT
    + "o.state = 'completed')"
    + _OF
    + "d.dependent = :seq ON CONFLICT DO NOTHING"
)
_LEARN_LAST = text(
    _LEARN
    + " SELECT j.queue, j.id, q.name, d.job_id, :ended, :error,"
    + _RESULT
    + ":ended = 'completed')"
    + _OF
    + "d.ended IS NULL ON CONFLICT DO NOTHING"
)
_OUTCOMES = text(
    "SELECT other_queue, other_id, ended, error, result FROM workers_outcomes WHERE queue = :queue AND job_id = :id"
)

_MOST: Final[Mapping[str, object]] = {"most": COPIED_BYTES}
_NO_ROW: Final = -1


class End(NamedTuple):
    """How a job ended, whose row is still there."""

    seq: int
    state: JobState
    error: ErrorInfo | None


def begin(transaction: Transaction, rows: Sequence[RowMapping]) -> None:
    """Mark the rows of jobs that follow others, and delete what earlier links of theirs were told."""
    for batch in batches(rows):
        bound = {"queue": transaction.queue, "ids": [row["id"] for row in batch]}
        transaction.connection.execute(_WIPE, bound)
        transaction.connection.execute(_BEGIN, {"seqs": [row["seq"] for row in batch]})


def learn(transaction: Transaction, job_id: str, over: Sequence[tuple[JobRef, End | None]]) -> None:
    """Tell the job, whose id is as the database has it, how those ended that have; None: nobody knows them."""
    if over:
        own = {**_MOST, "queue": transaction.queue, "job_id": job_id}
        rows = [{**own, **_told(transaction, other, end)} for other, end in over]
        transaction.connection.execute(_LEARN_AT_ONCE, rows)


def _told(transaction: Transaction, other: JobRef, end: End | None) -> dict[str, object]:
    failed = end is not None and end.state is JobState.FAILED
    return {
        "other_queue": transaction.encode(other.queue),
        "other_id": transaction.encode(other.id),
        "ended": REMOVED if end is None else end.state.value,
        "error": encode_error(end.error) if failed and end is not None and end.error is not None else None,
        "seq": end.seq if end is not None and end.state is JobState.COMPLETED else _NO_ROW,
    }


def learn_last(transaction: Transaction, end: Mapping[str, object]) -> None:
    """Tell the dependents how a job ended whose row is about to be deleted, on SQLite."""
    transaction.connection.execute(_LEARN_LAST, {**_MOST, **end})


def learn_ends(transaction: Transaction, dependencies: Sequence[Mapping[str, object]]) -> None:
    """Tell each of these dependents how the other job ended, on SQLite."""
    transaction.connection.execute(_LEARN_END, [{**_MOST, **one} for one in dependencies])


def outcomes(transaction: Transaction, job_id: str) -> dict[JobRef, JobOutcome | None]:
    """See `KnowsDependencies.outcomes`."""
    bound = {"queue": transaction.queue, "id": transaction.encode(job_id)}
    found: dict[JobRef, JobOutcome | None] = {}
    for row in transaction.connection.execute(_OUTCOMES, bound):
        other = JobRef(transaction.decode(row.other_queue), transaction.decode(row.other_id))
        found[other] = None
        if row.ended != REMOVED:
            kind, error = OutcomeKind(row.ended), decode_error(row.error)
            found[other] = JobOutcome(kind=kind, result=row.result, error=error)
    return found


Followed: TypeAlias = "str | JobRef"
"""A job by its id in the queue of the transaction, or in another one."""

_KNOWN = expanding(
    "SELECT id, state FROM workers_jobs WHERE queue = :queue AND id IN :ids"
    " AND (expires_at IS NULL OR expires_at > :now)",
    "ids",
)
_FOUND = locking(
    "SELECT seq, queue, id, state, error, keep_failed FROM workers_jobs WHERE queue = :queue AND id IN :ids"
    " AND (expires_at IS NULL OR expires_at > :now) ORDER BY seq",
    WAIT,
    lists="ids",
)
_WAIT = text("UPDATE workers_jobs SET state = 'waiting', run_at = created_at + :delay WHERE seq = :seq")
_FOLLOW = text(
    "INSERT INTO workers_dependencies (queue, job_id, dependent, fails) VALUES (:queue, :job_id, :seq, :fails)"
)
_MARK = expanding("UPDATE workers_jobs SET dependents = 1 WHERE seq IN :seqs", "seqs")
_GIVE_UP = text(
    "UPDATE workers_jobs SET state = 'failed', finished_at = :now, expires_at = :expires_at, error = :error"
    " WHERE seq = :seq"
)
_DELETE = text("DELETE FROM workers_jobs WHERE seq = :seq")
_DELETE_PAYLOAD = text("DELETE FROM workers_payloads WHERE seq = :seq")
_NOTE_END = text(
    "UPDATE workers_dependencies SET ended = :ended, error = :error"
    " WHERE queue = :queue AND job_id = :job_id AND ended IS NULL"
)
_QUEUE = text("SELECT id FROM workers_queues WHERE name = :name")
_NAME = text("SELECT name FROM workers_queues WHERE id = :queue")
_RELEASE_POSTGRES = text("SELECT workers_release(:queue, :job_id, :ended, :error)")

_ENDED = text(
    "SELECT d.queue, d.job_id, d.dependent AS seq, d.fails, d.ended, d.error, j.queue AS own_queue, j.id,"
    " j.keep_failed, (SELECT name FROM workers_queues WHERE id = d.queue AND id <> j.queue) AS elsewhere"
    " FROM workers_dependencies d JOIN workers_jobs j ON j.seq = d.dependent WHERE d.ended IS NOT NULL LIMIT 500"
)
_RESOLVED = text("DELETE FROM workers_dependencies WHERE queue = :queue AND job_id = :job_id AND dependent = :seq")
_FREE = expanding(
    "SELECT seq, queue, id FROM workers_jobs WHERE seq IN :seqs AND state = 'waiting'"
    " AND NOT EXISTS (SELECT 1 FROM workers_dependencies WHERE dependent = workers_jobs.seq) ORDER BY seq",
    "seqs",
)
_RELEASE = expanding(
    "UPDATE workers_jobs SET state = CASE WHEN run_at > created_at THEN 'scheduled' ELSE 'ready' END,"
    " run_at = :now + run_at - created_at WHERE seq IN :seqs",
    "seqs",
)


_FOLLOWED = text(
    "SELECT q.name, d.job_id AS id FROM workers_jobs j JOIN workers_dependencies d ON d.dependent = j.seq"
    " JOIN workers_queues q ON q.id = d.queue WHERE j.queue = :queue AND j.id = :id"
)
_FOLLOWERS = text(
    "SELECT q.name, j.id FROM workers_dependencies d JOIN workers_jobs j ON j.seq = d.dependent"
    " JOIN workers_queues q ON q.id = j.queue WHERE d.queue = :queue AND d.job_id = :id LIMIT :limit"
)


def followed(transaction: Transaction, job_id: str) -> list[JobRef]:
    """Return the jobs that the waiting one still follows."""
    return _refs(transaction, _FOLLOWED, {"id": transaction.encode(job_id)})


def followers(transaction: Transaction, job_id: str, limit: int) -> list[JobRef]:
    """Return some of the jobs that wait for this one."""
    return _refs(transaction, _FOLLOWERS, {"id": transaction.encode(job_id), "limit": bounded_count(limit)})


def _refs(transaction: Transaction, query: TextClause, values: Mapping[str, object]) -> list[JobRef]:
    rows = transaction.connection.execute(query, {"queue": transaction.queue, **values})
    return [JobRef(transaction.decode(row.name), transaction.decode(row.id)) for row in rows]


def refuse_unknown(transaction: Transaction, jobs: Sequence[NewJob]) -> None:
    """Accept jobs unless a new one must know how another ended, of which nothing is known.

    Raises:
        UnknownDependency: there is one.
    """
    if not any(job.follows for job in jobs):
        return
    states = _states(transaction, {one for job in jobs for one in (job.id, *job.follows)})
    begins = (None, RowState.FAILED, RowState.CANCELLED)
    earlier: set[str] = set()
    for job in jobs:
        is_new = job.id not in earlier and states.get(job.id) in begins
        if is_new and job.after_failure is AfterFailure.FAIL:
            unknown = [one for one in job.follows if one not in earlier and one not in states]
            if unknown:
                raise UnknownDependency(job.id, unknown)
        earlier.add(job.id)


def _states(transaction: Transaction, jobs: Iterable[Followed]) -> dict[Followed, str]:
    return {one: row["state"] for one, row in _rows(transaction, jobs, _KNOWN)}


def _rows(
    transaction: Transaction, jobs: Iterable[Followed], query: TextClause
) -> Iterator[tuple[Followed, RowMapping]]:
    """Yield the rows that there are of these jobs; queue by queue, so that two who lock them do it in one order."""
    numbers: dict[str, int] = {}
    by_queue: dict[int, dict[str, Followed]] = {}
    for one in jobs:
        queue = transaction.queue
        if isinstance(one, JobRef):
            queue = numbers[one.queue] = numbers.get(one.queue) or _queue(transaction, one.queue)
        by_queue.setdefault(queue, {})[transaction.encode(one.id if isinstance(one, JobRef) else one)] = one
    for queue, encoded in sorted(by_queue.items()):
        for batch in batches(sorted(encoded)):
            bound = {"queue": queue, "now": transaction.now, "ids": list(batch)}
            for row in transaction.connection.execute(query, bound).mappings():
                yield encoded[row["id"]], row


def _queue(transaction: Transaction, name: str) -> int:
    """Return the number of a queue; none has the number 0, which stands for one that nobody has used yet."""
    return int(transaction.connection.execute(_QUEUE, {"name": transaction.encode(name)}).scalar() or 0)


class _Graph:
    """The rows of jobs that were just inserted and follow others, and of those others."""

    def __init__(self, transaction: Transaction, jobs: Collection[Followed]) -> None:
        self._transaction = transaction
        self._found: dict[Followed, RowMapping] = {}
        self._ends: dict[Followed, End] = {}
        self._marked: set[int] = set()
        self._later: set[Followed] = set()
        for one, row in _rows(transaction, jobs, _FOUND[transaction.dialect]):
            self._found[one] = row
            if row["state"] in (RowState.COMPLETED, RowState.FAILED, RowState.CANCELLED):
                self._ends[one] = End(row["seq"], JobState(row["state"]), decode_error(row["error"]))

    def insert_all(self, jobs: Sequence[NewJob]) -> None:
        """Let each job wait; one that comes later in the call is unknown yet, or two could wait for each other."""
        self._later.update(job.id for job in jobs)
        begin(self._transaction, [self._found[job.id] for job in jobs if job.follows])
        for job in jobs:
            if job.follows:
                self.insert(job)
            self._later.discard(job.id)

    def insert(self, job: NewJob) -> None:
        """Let the job wait for those of its others that have not ended, or fail it."""
        left: list[Followed] = []
        over: list[tuple[JobRef, End | None]] = []
        obstacle: ErrorInfo | None = None
        for one in job.follows:
            if one in self._found and one not in self._ends and one not in self._later:
                left.append(one)
                continue
            end = self._ends.get(one)
            over.append((one if isinstance(one, JobRef) else JobRef(self._name, one), end))
            if (end is None or end.state is not JobState.COMPLETED) and job.after_failure is AfterFailure.FAIL:
                state, error = (None, None) if end is None else (end.state, end.error)
                obstacle = obstacle or dependency_error(one, state, error)
        learn(self._transaction, self._found[job.id]["id"], over)
        if obstacle is not None:
            self._give_up(job, obstacle)
            return
        if left:
            self._wait(job, left)

    def _wait(self, job: NewJob, left: Sequence[Followed]) -> None:
        seq = self._found[job.id]["seq"]
        bound = {"seq": seq, "fails": int(job.after_failure is AfterFailure.FAIL)}
        rows = [self._found[one] for one in left]
        self._transaction.connection.execute(_WAIT, {"seq": seq, "delay": duration(job.delay)})
        self._transaction.connection.execute(
            _FOLLOW, [{**bound, "queue": row["queue"], "job_id": row["id"]} for row in rows]
        )
        self._marked.update(row["seq"] for row in rows)

    def _give_up(self, job: NewJob, error: ErrorInfo) -> None:
        fail(self._transaction, self._found[job.id]["seq"], encode_retention(job.keep_failed), error)
        self._transaction.announce(JobEventKind.FAILED, [job.id])
        self._ends[job.id] = End(self._found[job.id]["seq"], JobState.FAILED, error)

    @cached_property
    def _name(self) -> str:
        """The name of the queue."""
        found = self._transaction.connection.execute(_NAME, {"queue": self._transaction.queue})
        return self._transaction.decode(str(found.scalar_one()))

    def mark(self) -> None:
        """Mark the jobs that others follow now. Even one that is marked is written: see `workers_release`."""
        for batch in batches(sorted(self._marked)):
            self._transaction.connection.execute(_MARK, {"seqs": list(batch)})


def insert(transaction: Transaction, jobs: Sequence[NewJob]) -> None:
    """Let jobs that were just inserted, or go on as these, wait for those they follow."""
    following = [job for job in jobs if job.follows]
    if not following:
        return
    transaction.ends = True
    graph = _Graph(transaction, {one for job in following for one in (job.id, *job.follows)})
    graph.insert_all(jobs)
    graph.mark()


def fail(transaction: Transaction, seq: int, keep: int | None, error: ErrorInfo) -> None:
    """Fail the job because of one that it follows."""
    if keep is None:
        transaction.connection.execute(_DELETE, {"seq": seq})
        transaction.connection.execute(_DELETE_PAYLOAD, {"seq": seq})
        return
    transaction.connection.execute(_GIVE_UP, _failure(transaction, seq, keep, error))


def _failure(transaction: Transaction, seq: int, keep: int, error: ErrorInfo) -> dict[str, int | str]:
    return {"seq": seq, "now": transaction.now, "expires_at": transaction.now + keep, "error": encode_error(error)}


def tell_end(transaction: Transaction, job_id: str, ended: RowState, error: str | None = None) -> None:
    """Tell the dependents how a job ended that is about to be deleted with its end; `job_id` as the database has it."""
    bound = {"queue": transaction.queue, "job_id": job_id, "ended": ended.value, "error": error}
    if transaction.dialect == "postgresql":
        transaction.connection.execute(_RELEASE_POSTGRES, bound)
    else:
        learn_last(transaction, bound)
        transaction.connection.execute(_NOTE_END, bound)


def resolve(transaction: Transaction) -> None:
    """Release or fail those who wait for what has ended, in whatever queue, on SQLite."""
    while rows := transaction.connection.execute(_ENDED).mappings().all():
        learn_ends(transaction, _edges(rows))
        giving_up: dict[int, RowMapping] = {}
        for row in rows:
            if row["fails"] and row["ended"] != RowState.COMPLETED:
                giving_up.setdefault(row["seq"], row)
        _give_up(transaction, list(giving_up.values()))
        _release(transaction, [row for row in rows if row["seq"] not in giving_up])


def _edges(rows: Sequence[RowMapping]) -> list[dict[str, object]]:
    return [{"queue": row["queue"], "job_id": row["job_id"], "seq": row["seq"]} for row in rows]


def _give_up(transaction: Transaction, rows: Sequence[RowMapping]) -> None:
    """Fail these jobs, each because of the one that its row is about; whom else they follow is forgotten with that."""
    ended = []
    for row in rows:
        there = transaction.on(row["own_queue"])
        state = None if row["ended"] == REMOVED else JobState(row["ended"])
        dependency = row["job_id"] if row["elsewhere"] is None else JobRef(row["elsewhere"], row["job_id"])
        error = dependency_error(dependency, state, decode_error(row["error"]))
        if row["keep_failed"] is None:
            tell_end(there, row["id"], RowState.FAILED, encode_error(error))
            fail(there, row["seq"], None, error)
        else:
            ended.append(_failure(there, row["seq"], row["keep_failed"], error))
        there.announce(JobEventKind.FAILED, [row["id"]])
        there.wake = True
    if ended:
        transaction.connection.execute(_GIVE_UP, ended)


def _release(transaction: Transaction, rows: Sequence[RowMapping]) -> None:
    """Shorten the waits that these rows are about, and release the jobs that wait for nobody any more."""
    if not rows:
        return
    transaction.connection.execute(_RESOLVED, _edges(rows))
    for batch in batches(list({row["seq"] for row in rows})):
        free = transaction.connection.execute(_FREE, {"seqs": list(batch)}).all()
        transaction.connection.execute(_RELEASE, {"now": transaction.now, "seqs": [seq for seq, _, _ in free]})
        for _, queue, job_id in free:
            transaction.on(queue).announce(JobEventKind.QUEUED, [job_id])
            transaction.on(queue).wake = True
