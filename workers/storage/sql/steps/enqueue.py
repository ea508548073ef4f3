"""What an enqueue decides about jobs that are there already, and about deduplication keys.

Theory of operation. By `simple` and `debounce` the key is in the row of its job, and belongs to the job as long as
`expires_at` is NULL. Whatever ends the job, or deletes the row, frees the key in the same statement, and jobs without
keys cost nothing extra. A claim removes a debounced key from the row, and the retry of a failed job removes any key. By
`throttle` the key outlives its job, in `workers_marks`.

On PostgreSQL producers run side by side. A transaction that finds keys free inserts placeholders for them (`until` is
0, so they are over already), sorted and before it locks anything else, and reads again. Another producer of the same
key blocks on the placeholder until that transaction has ended. The placeholders are deleted before it commits. A
transaction that finds a key taken locks nothing, except a job that it debounces. The unique index on the keys is there
for callers' transactions, which may read an old snapshot.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import RowMapping, text

from workers.deduplication import Deduplication, DeduplicationMode
from workers.jobs import EnqueueResult, EnqueueStatus, JobState, NewJob
from workers.storage.sql.rows import (
    SKIP,
    RowState,
    Transaction,
    batches,
    duration,
    expanding,
    locking,
    next_seq,
    public_state,
)
from workers.storage.sql.steps.ends import unhold

_HAD = expanding(
    "SELECT deduplication_key AS key, seq, id, deduplication_mode AS mode, state, run_at, ordering_key"
    " FROM workers_jobs WHERE queue = :queue AND deduplication_key IN :keys AND expires_at IS NULL",
    "keys",
)
# `+until` keeps SQLite's planner from the index on the times; on PostgreSQL other spellings have the same effect.
_THROTTLED = expanding(
    "SELECT m.key AS key, j.seq AS seq, m.job_id AS id, 'throttle' AS mode, j.state AS state, j.run_at AS run_at,"
    " j.ordering_key AS ordering_key FROM workers_marks m LEFT JOIN workers_jobs j ON j.queue = m.queue"
    " AND j.id = m.job_id AND (j.expires_at IS NULL OR j.expires_at > :now)"
    " WHERE m.queue = :queue AND m.key IN :keys AND +m.until > :now",
    "keys",
)
_TAKE_POSTGRES = text("SELECT * FROM workers_take_keys(:queue, CAST(:keys AS text[]), CAST(:debounced AS text[]))")
_GIVE = text(
    "UPDATE workers_jobs SET deduplication_key = :key, deduplication_mode = :mode WHERE queue = :queue AND id = :id"
)
_THROTTLE = text(
    "INSERT INTO workers_marks (queue, key, job_id, until) VALUES (:queue, :key, :id, :until)"
    " ON CONFLICT (queue, key) DO UPDATE SET job_id = excluded.job_id, until = excluded.until"
)
_LET_GO_POSTGRES = text(
    "DELETE FROM workers_marks WHERE queue = :queue AND key = ANY(CAST(:keys AS text[]))"
    " AND until IS NOT DISTINCT FROM 0"
)

# The new number puts it behind everything that is there.
_DEBOUNCE = text("UPDATE workers_jobs SET seq = :next, state = 'scheduled', run_at = :run_at WHERE seq = :seq")
_DEBOUNCE_PAYLOAD = text("UPDATE workers_payloads SET seq = :next, data = :data WHERE seq = :seq")
# See `dependents`: a job that waits for others keeps its delay there until they have ended.
_DEBOUNCE_WAITING = text("UPDATE workers_jobs SET run_at = created_at + :delay WHERE seq = :seq")
_REPLACE_PAYLOAD = text("UPDATE workers_payloads SET data = :data WHERE seq = :seq")
_DEBOUNCE_POSTGRES = text(
    "WITH moved AS (UPDATE workers_jobs SET seq = nextval('workers_jobs_seq_seq'), state = 'scheduled',"
    " run_at = :run_at WHERE seq = :seq RETURNING seq)"
    " UPDATE workers_payloads SET seq = moved.seq, data = :data FROM moved WHERE workers_payloads.seq = :seq"
)

_OVER = locking(
    "SELECT key FROM workers_marks WHERE queue = :queue AND until <= :now ORDER BY until LIMIT :limit", SKIP
)
_FORGET = expanding("DELETE FROM workers_marks WHERE queue = :queue AND key IN :keys", "keys")


@dataclass(slots=True, kw_only=True)
class _Holder:
    """The job that had a key before the call; with `state` None the job is gone, and the key is throttled."""

    job_id: str
    mode: str
    state: JobState | None
    seq: int
    ordering_key: str | None


class Keys:
    """The deduplication keys of one call: which job has each, and which of the call's jobs are to take one.

    On PostgreSQL the transaction holds the free ones from the construction of this object until `write`.
    """

    def __init__(self, transaction: Transaction, jobs: Sequence[NewJob]) -> None:
        self._transaction = transaction
        self._holders: dict[str, _Holder] = {}
        self._groups: dict[str, list[NewJob]] = {}
        self._debounced: dict[str, NewJob] = {}
        self._own: list[str] = []
        asked = [job.deduplication for job in jobs if job.deduplication is not None]
        if asked:
            self._look(asked)

    def _look(self, asked: Sequence[Deduplication]) -> None:
        keys = list({self._transaction.encode(one.key) for one in asked})
        if self._transaction.dialect == "postgresql":
            debounced = {self._transaction.encode(one.key) for one in asked if _is_debounce(one)}
            bound = {"queue": self._transaction.queue, "keys": keys, "debounced": list(debounced)}
            rows = self._transaction.connection.execute(_TAKE_POSTGRES, bound).mappings().all()
            taken = {row["key"] for row in rows if not row["own"]}
            self._own = [key for key in keys if key not in taken]
            self._note(rows)
            return
        for batch in batches(keys):
            bound = {"queue": self._transaction.queue, "now": self._transaction.now, "keys": list(batch)}
            for statement in (_HAD, _THROTTLED):
                self._note(self._transaction.connection.execute(statement, bound).mappings().all())

    def _note(self, rows: Sequence[RowMapping]) -> None:
        for row in rows:
            state = None if row["seq"] is None else public_state(row["state"], row["run_at"], self._transaction.now)
            holder = _Holder(
                job_id=self._transaction.decode(row["id"]),
                mode=row["mode"],
                state=state,
                seq=row["seq"],
                ordering_key=row["ordering_key"],
            )
            self._holders.setdefault(row["key"], holder)

    def duplicate(
        self, job: NewJob, deduplication: Deduplication, found: dict[str, EnqueueResult]
    ) -> EnqueueResult | None:
        """Return the answer for a job whose key another job has.

        None: the job is to be inserted, with its group. `found` has the answers for the ids that exist by now. A
        throttled job that has ended may begin anew in this very call, and a debounced one may be named in it.
        """
        key = self._transaction.encode(deduplication.key)
        holder = self._holders.get(key)
        if holder is None:
            self._groups.setdefault(key, []).append(job)
            return None
        state = holder.state
        if holder.mode == DeduplicationMode.THROTTLE and holder.job_id in found:
            state = found[holder.job_id].existing_state
        if holder.mode == DeduplicationMode.DEBOUNCE and _is_debounce(deduplication):
            self._debounced[key] = job
            if state is not JobState.WAITING:
                holder.state = state = JobState.SCHEDULED
            found[holder.job_id] = _duplicate(holder.job_id, state)
        return _duplicate(holder.job_id, state)

    def write(self, inserted: Collection[str]) -> None:
        """Give each key to the first inserted job of its group.

        Debounced jobs wait anew, with the last payload. On PostgreSQL another transaction may have inserted an id
        first.
        """
        firsts = {key: next((job for job in group if job.id in inserted), None) for key, group in self._groups.items()}
        self._give({key: job for key, job in firsts.items() if job is not None})
        self._debounce()
        if self._own:
            bound = {"queue": self._transaction.queue, "keys": self._own}
            self._transaction.connection.execute(_LET_GO_POSTGRES, bound)

    def _give(self, firsts: Mapping[str, NewJob]) -> None:
        given: list[dict[str, int | str]] = []
        throttled: list[dict[str, int | str]] = []
        for key, job in firsts.items():
            row: dict[str, int | str] = {
                "queue": self._transaction.queue,
                "key": key,
                "id": self._transaction.encode(job.id),
            }
            match job.deduplication:
                case Deduplication(mode=DeduplicationMode.THROTTLE, ttl=timedelta() as ttl):
                    until = self._transaction.now + duration(job.delay) + duration(ttl)
                    throttled.append({**row, "until": until})
                case Deduplication(mode=mode):
                    given.append({**row, "mode": str(mode)})
        for statement, rows in ((_GIVE, given), (_THROTTLE, throttled)):
            if rows:
                self._transaction.connection.execute(statement, rows)

    def _debounce(self) -> None:
        if not self._debounced:
            return
        rows = [
            {
                "seq": self._holders[key].seq,
                "run_at": self._transaction.now + duration(job.delay),
                "data": job.payload,
            }
            for key, job in self._debounced.items()
            if self._holders[key].state is not JobState.WAITING
        ]
        waiting = [
            {"seq": self._holders[key].seq, "delay": duration(job.delay), "data": job.payload}
            for key, job in self._debounced.items()
            if self._holders[key].state is JobState.WAITING
        ]
        if waiting:
            self._transaction.connection.execute(_DEBOUNCE_WAITING, waiting)
            self._transaction.connection.execute(_REPLACE_PAYLOAD, waiting)
        if not rows:
            return
        if self._transaction.dialect == "postgresql":
            self._transaction.connection.execute(_DEBOUNCE_POSTGRES, rows)
        else:
            numbered = [{**row, "next": number} for number, row in enumerate(rows, next_seq(self._transaction))]
            self._transaction.connection.execute(_DEBOUNCE, numbered)
            self._transaction.connection.execute(_DEBOUNCE_PAYLOAD, numbered)
        unhold(self._transaction, [self._holders[key].ordering_key for key in self._debounced])
        self._transaction.wake = True  # it may be due earlier than before


def _duplicate(job_id: str, state: JobState | None) -> EnqueueResult:
    return EnqueueResult(id=job_id, status=EnqueueStatus.DUPLICATE, existing_state=state)


def _is_debounce(deduplication: Deduplication) -> bool:
    return deduplication.mode == DeduplicationMode.DEBOUNCE


def sweep_keys(transaction: Transaction, limit: int) -> int:
    """Delete up to `limit` throttled keys whose time is over; return how many."""
    bound = {"queue": transaction.queue, "now": transaction.now, "limit": limit}
    over = transaction.connection.execute(_OVER[transaction.dialect], bound).scalars().all()
    for batch in batches(over):
        transaction.connection.execute(_FORGET, {"queue": transaction.queue, "keys": list(batch)})
    return len(over)


_KNOWN = expanding(
    "SELECT id, seq, state, run_at, expires_at, CASE WHEN state = 'completed' THEN"
    " (SELECT data FROM workers_payloads WHERE workers_payloads.seq = workers_jobs.seq) END AS result"
    " FROM workers_jobs WHERE queue = :queue AND id IN :ids",
    "ids",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The answer to an enqueue, which holds if its `new` jobs are inserted, and the rows that must go before."""

    results: list[EnqueueResult]
    new: list[NewJob]
    stale: list[int]
    keys: Keys


def decide(transaction: Transaction, jobs: Sequence[NewJob]) -> Decision:
    """Decide without writing, except that the free deduplication keys of new jobs are reserved."""
    keys = Keys(transaction, jobs)
    found, stale = _known(transaction, jobs)
    results, new = [], []
    for job in jobs:
        result = found.get(job.id)
        if result is None and job.deduplication is not None:
            result = keys.duplicate(job, job.deduplication, found)
        if result is None:
            result = EnqueueResult(id=job.id, status=EnqueueStatus.QUEUED)
            state = JobState.WAITING if job.follows else JobState.SCHEDULED if job.delay else JobState.QUEUED
            found[job.id] = EnqueueResult(id=job.id, status=EnqueueStatus.DUPLICATE, existing_state=state)
            new.append(job)
        results.append(result)
    return Decision(results=results, new=new, stale=[stale[job.id] for job in new if job.id in stale], keys=keys)


def _known(transaction: Transaction, jobs: Sequence[NewJob]) -> tuple[dict[str, EnqueueResult], dict[str, int]]:
    """Return the answers for the ids that exist, and the rows that a new generation replaces."""
    found: dict[str, EnqueueResult] = {}
    stale: dict[str, int] = {}
    for batch in batches([transaction.encode(job.id) for job in jobs]):
        for row in transaction.connection.execute(_KNOWN, {"queue": transaction.queue, "ids": list(batch)}).mappings():
            job_id = transaction.decode(row["id"])
            existing = _existing(transaction, row, job_id)
            if existing is None:
                stale[job_id] = row["seq"]
            else:
                found[job_id] = existing
    return found, stale


def _existing(transaction: Transaction, row: RowMapping, job_id: str) -> EnqueueResult | None:
    if row["expires_at"] is not None and row["expires_at"] <= transaction.now:
        return None
    if row["state"] in (RowState.FAILED, RowState.CANCELLED):
        return None
    state = public_state(row["state"], row["run_at"], transaction.now)
    status = EnqueueStatus.COMPLETED if state is JobState.COMPLETED else EnqueueStatus.DUPLICATE
    return EnqueueResult(id=job_id, status=status, existing_state=state, result=row["result"])
