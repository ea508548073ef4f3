"""The limits of a queue, and what keeps jobs back: the steps that both databases share.

Theory of operation. A job's holding key (`workers.limits`) is in the column `ordering_key`. Claims set the jobs of a
closed key aside (`held`) as they meet them, as those of a busy ordering key. When an attempt ends, the first held job
of each name becomes ready, and the next claim decides. A key that a token opens is noted in `workers_gates` with that
time, at which a claim does the same; so is each key of a limit that has changed.

Of a fair key one job of each name is the front, and the claim that takes it brings the next forward, with a new number,
behind all that are ready. The others are held as claims meet them, but for one that is more urgent than the front. Only
claims write fronts and buckets: on PostgreSQL under the lock of the key, so that no other transaction is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import RowMapping, text

from workers.limits import (
    LIMIT_MARK,
    QUEUE_KEY,
    SEPARATOR,
    HeldBack,
    Limit,
    check_limits,
    limit_key_of,
)
from workers.storage.sql.rows import SKIP, Transaction, batches, expanding, locking

_LIMITS = text("SELECT name, version, rate, burst, concurrency FROM workers_limits WHERE queue = :queue")
_KEEP = text(
    "INSERT INTO workers_limits (queue, name, version, rate, burst, concurrency, gap, capacity)"
    " VALUES (:queue, :name, :version, :rate, :burst, :concurrency, :gap, :capacity)"
    " ON CONFLICT (queue, name) DO UPDATE SET version = excluded.version, rate = excluded.rate, burst = excluded.burst,"
    " concurrency = excluded.concurrency, gap = excluded.gap, capacity = excluded.capacity"
    " WHERE excluded.version >= workers_limits.version"
)
_FORGET = text("DELETE FROM workers_limits WHERE queue = :queue AND name = :name")
_HELD_BY = text(
    "SELECT DISTINCT ordering_key FROM workers_jobs WHERE queue = :queue AND state = 'held'"
    " AND substr(ordering_key, 1, :length) = :prefix"
)
_LOCK_KEYS = text(
    "SELECT pg_advisory_xact_lock(key) FROM (SELECT DISTINCT workers_key(:queue, gate) AS key"
    " FROM unnest(CAST(:keys AS text[])) AS gate ORDER BY 1) keys"
)
_OPEN_AT = text(
    "INSERT INTO workers_gates (queue, gate, name, opens_at) VALUES (:queue, :key, '', :opens_at)"
    " ON CONFLICT (queue, gate, name) DO UPDATE SET opens_at = excluded.opens_at"
)
_FULL_AT = text("SELECT full_at FROM workers_gates WHERE queue = :queue AND gate = :key AND name = ''")
_RUNNING = text(
    "SELECT count(*) FROM (SELECT 1 FROM workers_jobs WHERE queue = :queue AND state = 'processing'"
    " AND ordering_key = :key LIMIT :most) running"
)
_ALL_RUNNING = text(
    "SELECT count(*) FROM (SELECT 1 FROM workers_jobs WHERE queue = :queue AND state = 'processing'"
    " AND lease_until >= 0 LIMIT :most) running"
)
_QUEUED = expanding(
    "SELECT id, ordering_key FROM workers_jobs WHERE queue = :queue AND id IN :ids"
    " AND (state IN ('ready', 'held') OR (state IN ('scheduled', 'failing') AND run_at <= :now))",
    "ids",
)
_FULL = locking(
    "SELECT gate FROM workers_gates WHERE queue = :queue AND full_at <= :now AND opens_at IS NULL"
    " ORDER BY full_at LIMIT :limit",
    SKIP,
)
_STALE = locking(
    "SELECT gate, name FROM workers_gates WHERE queue = :queue AND front IS NOT NULL AND NOT EXISTS"
    " (SELECT 1 FROM workers_jobs WHERE seq = front AND state = 'ready') LIMIT :limit",
    SKIP,
)
_GONE = text("DELETE FROM workers_gates WHERE queue = :queue AND gate = :key AND name = :name")

WHEN_ONE_ENDS: Final = datetime.max.replace(tzinfo=UTC)
"""Until when a key is closed of which as many jobs run as may at once."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


def microseconds(moment: datetime) -> int:
    return (moment - _EPOCH) // _MICROSECOND


class Buckets:
    """The limits of a queue and the buckets of their keys, as they are at the beginning of a transaction."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self.now = _EPOCH + timedelta(milliseconds=transaction.now)
        self.limits = declared(transaction)
        self.running: dict[str, int] = {}
        self._full: dict[str, datetime | None] = {}

    def limit_of(self, key: str) -> Limit | None:
        own = limit_key_of(key)
        return None if own is None else self.limits.get(own.limit)

    def closed_until(self, key: str) -> datetime | None:
        """Return until when no job of the key may start, None if one may."""
        limit = self.limit_of(key)
        if limit is None:
            return None
        if limit.concurrency is not None and self._running(key, limit.concurrency) >= limit.concurrency:
            return WHEN_ONE_ENDS
        return limit.opens_at(limit.known(self.full_at(key), self.now), self.now)

    def _running(self, key: str, most: int) -> int:
        if key not in self.running:
            bound = {"queue": self._transaction.queue, "key": self._transaction.encode(key), "most": most}
            statement = _ALL_RUNNING if key == QUEUE_KEY else _RUNNING
            self.running[key] = self._transaction.connection.execute(statement, bound).scalar_one()
        return self.running[key]

    def full_at(self, key: str) -> datetime | None:
        """Return when the key's bucket is full again; None for one of which nothing is kept."""
        if key not in self._full:
            bound = {"queue": self._transaction.queue, "key": self._transaction.encode(key)}
            found = self._transaction.connection.execute(_FULL_AT, bound).scalar()
            self._full[key] = None if found is None else _EPOCH + found * _MICROSECOND
        return self._full[key]

    def note(self, key: str, full_at: datetime) -> None:
        """Note that the bucket is full then; the caller writes it."""
        self._full[key] = full_at


def declare(transaction: Transaction, limits: Mapping[str, Limit]) -> bool:
    """See `KeepsLimits.declare_limits`; return whether that wrote anything."""
    check_limits(limits)
    before = declared(transaction)
    wrote = False
    for name, limit in limits.items():
        row = {
            "queue": transaction.queue,
            "name": transaction.encode(name),
            "version": limit.version,
            "rate": limit.rate,
            "burst": limit.burst,
            "concurrency": limit.concurrency,
            "gap": None if limit.interval is None else limit.interval // _MICROSECOND,
            "capacity": limit.capacity,
        }
        if before.get(name) != limit and transaction.connection.execute(_KEEP, row).rowcount:
            _look_again(transaction, name)
            wrote = True
    return wrote


def declared(transaction: Transaction) -> dict[str, Limit]:
    """See `KeepsLimits.declared_limits`."""
    rows = transaction.connection.execute(_LIMITS, {"queue": transaction.queue}).mappings()
    return {transaction.decode(row["name"]): _decoded(row) for row in rows}


def _decoded(row: RowMapping) -> Limit:
    return Limit(row["rate"], concurrency=row["concurrency"], burst=row["burst"], version=row["version"])


def remove(transaction: Transaction, name: str) -> bool:
    """See `KeepsLimits.remove_limit`."""
    bound = {"queue": transaction.queue, "name": transaction.encode(name)}
    gone = transaction.connection.execute(_FORGET, bound).rowcount
    if gone:
        _look_again(transaction, name)
    return bool(gone)


def _look_again(transaction: Transaction, name: str) -> None:
    """Let the next claim look at the jobs that the limit kept back."""
    prefix = transaction.encode(f"{LIMIT_MARK}{name}{SEPARATOR}")
    bound = {"queue": transaction.queue, "prefix": prefix, "length": len(prefix)}
    held = transaction.connection.execute(_HELD_BY, bound).scalars().all()
    if transaction.dialect == "postgresql" and held:
        transaction.connection.execute(_LOCK_KEYS, {"queue": transaction.queue, "keys": list(held)})
    for key in held:
        bound = {"queue": transaction.queue, "key": key, "opens_at": transaction.now * 1000}
        transaction.connection.execute(_OPEN_AT, bound)
    transaction.wake = True


def held_back(transaction: Transaction, ids: Sequence[str]) -> list[HeldBack | None]:
    """See `KeepsLimits.held_back`."""
    buckets = Buckets(transaction)
    if not buckets.limits:
        return [None] * len(ids)
    found: dict[str, HeldBack | None] = {}
    for batch in batches([transaction.encode(job_id) for job_id in ids]):
        bound = {"queue": transaction.queue, "now": transaction.now, "ids": list(batch)}
        for job_id, key in transaction.connection.execute(_QUEUED, bound):
            own = None if key is None else transaction.decode(key)
            found[transaction.decode(job_id)] = _held_back(buckets, own)
    return [found.get(job_id) for job_id in ids]


def _held_back(buckets: Buckets, key: str | None) -> HeldBack | None:
    for one in (key, QUEUE_KEY):
        own = limit_key_of(one)
        closed = None if one is None or own is None else buckets.closed_until(one)
        if own is not None and closed is not None:
            return HeldBack(*own, None if closed is WHEN_ONE_ENDS else closed)
    return None


def sweep_buckets(transaction: Transaction, limit: int) -> int:
    """Delete up to `limit` buckets that are full, and fronts that are gone; return how many."""
    bound = {"queue": transaction.queue, "now": transaction.now * 1000, "limit": limit}
    gone = [(key, "") for key in transaction.connection.execute(_FULL[transaction.dialect], bound).scalars()]
    bound["limit"] = limit - len(gone)
    gone += [(row.gate, row.name) for row in transaction.connection.execute(_STALE[transaction.dialect], bound)]
    for key, name in gone:
        transaction.connection.execute(_GONE, {"queue": transaction.queue, "key": key, "name": name})
    return len(gone)
