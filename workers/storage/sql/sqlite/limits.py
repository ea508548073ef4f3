"""Limits and fair keys in one claim on SQLite; `../steps/limits.py` says how they work."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import CursorResult, TextClause, text

from workers.limits import FAIR_MARK, QUEUE_KEY, RESERVED, WHOLE_QUEUE
from workers.storage.sql.direct import Answer
from workers.storage.sql.rows import Transaction, next_seq
from workers.storage.sql.steps.ends import unhold
from workers.storage.sql.steps.limits import WHEN_ONE_ENDS, Buckets, microseconds

_OPENED = text(
    "SELECT gate FROM workers_gates WHERE queue = :queue AND opens_at IS NOT NULL"
    " AND (opens_at <= :now OR opens_at > :late) ORDER BY opens_at LIMIT 500"
)
_NO_OPENING = text(
    "UPDATE workers_gates SET opens_at = NULL WHERE queue = :queue AND gate = :key AND full_at IS NOT NULL"
)
_CLEAN = text("DELETE FROM workers_gates WHERE queue = :queue AND gate = :key AND full_at IS NULL AND front IS NULL")
_FILL = text(
    "INSERT INTO workers_gates (queue, gate, name, full_at) VALUES (:queue, :key, '', :full_at)"
    " ON CONFLICT (queue, gate, name) DO UPDATE SET full_at = excluded.full_at"
)
_OPENS = text(
    "INSERT INTO workers_gates (queue, gate, name, opens_at) VALUES (:queue, :key, '', :opens_at)"
    " ON CONFLICT (queue, gate, name) DO UPDATE SET opens_at = excluded.opens_at"
)
_FRONT = text(
    "SELECT front FROM workers_gates WHERE queue = :queue AND gate = :key AND name = :name"
    " AND EXISTS (SELECT 1 FROM workers_jobs WHERE seq = front AND state = 'ready'"
    " AND priority <= (SELECT priority FROM workers_jobs WHERE seq = :seq))"
)
_NEXT = text(
    "SELECT seq FROM workers_jobs WHERE queue = :queue AND state = 'held' AND ordering_key = :key AND name = :name"
    " ORDER BY priority, run_at, seq LIMIT 1"
)
_FORWARD = text("UPDATE workers_jobs SET seq = :next, state = 'ready', run_at = max(run_at, :now) WHERE seq = :seq")
_PAYLOAD = text("UPDATE workers_payloads SET seq = :next WHERE seq = :seq")
_SET_FRONT = text(
    "INSERT INTO workers_gates (queue, gate, name, front) VALUES (:queue, :key, :name, :front)"
    " ON CONFLICT (queue, gate, name) DO UPDATE SET front = excluded.front"
)
_NO_FRONT = text("DELETE FROM workers_gates WHERE queue = :queue AND gate = :key AND name = :name")
_RELEASE = text(
    "UPDATE workers_jobs SET state = 'ready' WHERE seq IN (SELECT seq FROM workers_jobs WHERE queue = :queue"
    " AND state = 'held' AND ordering_key = :key AND name = :name ORDER BY priority, run_at, seq LIMIT :count)"
)
_NEXT_OPENING = text(
    "SELECT opens_at FROM workers_gates WHERE queue = :queue AND opens_at IS NOT NULL ORDER BY opens_at LIMIT 1"
)

LOOK_AGAIN: Final = timedelta(milliseconds=50)
"""How often a waiter looks whether a queue has room that runs as many jobs as it may."""


class ClaimLimits:
    """Which jobs a claim may take, and which come up after them."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._buckets = Buckets(transaction)
        self._passed: list[tuple[str, str]] = []
        self._served: dict[tuple[str, str], None] = {}  # in the order in which they were
        self._looked_on = False

    def open_what_is_due(self) -> None:
        """Let jobs come up whose key has opened."""
        gaps = [limit.interval for limit in self._buckets.limits.values() if limit.interval is not None]
        now = self._transaction.now * 1000
        # A key that opens later than the slowest limit lets, was noted before the clock was set back.
        late = now + max(gaps, default=timedelta(0)) // timedelta(microseconds=1)
        for key in self._execute(_OPENED, now=now, late=late).scalars().all():
            self._execute(_CLEAN, key=key)
            self._execute(_NO_OPENING, key=key)
            unhold(self._transaction, [key])

    def room(self, limit: int) -> int:
        """Return how many jobs of all may start, up to `limit`."""
        if WHOLE_QUEUE not in self._buckets.limits:
            return limit
        for count in range(limit):
            if self._buckets.closed_until(QUEUE_KEY) is not None:
                return count
            self._take(QUEUE_KEY)
        return limit

    def write_queue(self, taken: int) -> None:
        """Write down that so many jobs have started in the whole queue."""
        if WHOLE_QUEUE in self._buckets.limits and taken:
            self._buckets = Buckets(self._transaction)
            for _ in range(taken):
                self._take(QUEUE_KEY)
            self._write_bucket(QUEUE_KEY)

    def passes(self, seq: int, key: str, name: str) -> bool:
        """Tell whether the job may be taken, and note it; otherwise it is to be held."""
        if key.startswith(FAIR_MARK):
            if (key, name) in self._served:
                return False
            front = self._execute(_FRONT, key=key, name=name, seq=seq).scalar()
            if front is not None and front != seq:
                return False
            self._served[key, name] = None
            return True
        closed = self._buckets.closed_until(key)
        if closed is not None:
            self._open_later(key, closed)
            return False
        self._take(key)
        self._write_bucket(key)
        self._passed.append((key, name))
        return True

    def was_served(self, key: str, name: str) -> bool:
        """Tell whether the key is a fair key whose front was taken, so that its other jobs are to be held."""
        return (key, name) in self._served

    def _take(self, key: str) -> None:
        limit = self._buckets.limit_of(key)
        if limit is None:
            return
        if key in self._buckets.running:
            self._buckets.running[key] += 1
        now = self._buckets.now
        full_at = limit.taken(limit.known(self._buckets.full_at(key), now), now)
        if full_at is not None:
            self._buckets.note(key, full_at)

    def _write_bucket(self, key: str) -> None:
        full_at = self._buckets.full_at(key)
        if full_at is not None:
            self._execute(_FILL, key=key, full_at=microseconds(full_at))

    def _open_later(self, key: str, until: datetime) -> None:
        limit = self._buckets.limit_of(key)
        if until is WHEN_ONE_ENDS or limit is None:
            return
        known = limit.known(self._buckets.full_at(key), self._buckets.now)
        if known is not None and known != self._buckets.full_at(key):
            self._buckets.note(key, known)
            self._write_bucket(key)
        self._execute(_OPENS, key=key, opens_at=microseconds(until))

    def come_up(self, wanted: int) -> bool:
        """Let the next jobs of the keys come up whose last ones were taken; tell whether some did."""
        came_up = False
        for key, name in dict.fromkeys(self._passed):
            if (closed := self._buckets.closed_until(key)) is None:
                count = max(1, wanted)
                came_up = bool(self._execute(_RELEASE, key=key, name=name, count=count).rowcount) or came_up
                unhold(self._transaction, [key])
            else:
                self._open_later(key, closed)
        self._passed.clear()
        for key, name in list(self._served):
            if self._bring_forward(key, name):
                del self._served[key, name]
                came_up = True
        return came_up

    def looks_on(self) -> bool:
        """Tell, once, whether jobs of a fair key that was served may be ready behind those that were seen."""
        looks_on = bool(self._served) and not self._looked_on
        self._looked_on = self._looked_on or looks_on
        return looks_on

    def _bring_forward(self, key: str, name: str) -> bool:
        seq = self._execute(_NEXT, key=key, name=name).scalar()
        if seq is None:
            self._execute(_NO_FRONT, key=key, name=name)
            return False
        numbers = {"seq": seq, "next": next_seq(self._transaction)}
        self._transaction.connection.execute(_FORWARD, {**numbers, "now": self._transaction.now})
        self._transaction.connection.execute(_PAYLOAD, numbers)
        self._execute(_SET_FRONT, key=key, name=name, front=numbers["next"])
        return True

    def _execute(self, statement: TextClause, **values: int | str) -> CursorResult[Any] | Answer:
        return self._transaction.connection.execute(statement, {"queue": self._transaction.queue, **values})


def claimable_in(transaction: Transaction, ready: bool) -> timedelta | None:
    """Return how long until a claim may succeed; `ready` tells whether there are jobs but for their keys."""
    buckets = Buckets(transaction)
    closed = buckets.closed_until(QUEUE_KEY)
    if ready and closed is None:
        return timedelta(0)
    if ready and closed is WHEN_ONE_ENDS:
        return LOOK_AGAIN
    opens = transaction.connection.execute(_NEXT_OPENING, {"queue": transaction.queue}).scalar()
    times = [] if opens is None else [timedelta(microseconds=opens - microseconds(buckets.now))]
    if ready and closed is not None:
        times.append(closed - buckets.now)
    return max(min(times), timedelta(0)) if times else None


def is_limited(key: str) -> bool:
    """Tell whether the key is that of a limit or a fair key, and no ordering key."""
    return key.startswith(RESERVED)
