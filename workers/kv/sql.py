"""A key-value store in an SQL database: an SQLite file or PostgreSQL.

Theory of operation. One table, one row per key. An expired row counts as absent in every statement, so nobody has to
remove it in time. Each write removes a few expired rows, so that more go than come. On PostgreSQL a write locks the row
of its own key first and then takes only expired rows that nobody has locked: no two writers wait for each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Final, Self, TypeAlias, TypeVar

from sqlalchemy import URL, BigInteger, Column, Engine, LargeBinary, MetaData, Table, TextClause, text
from sqlalchemy.ext.asyncio import AsyncEngine

from workers.clock import Clock, SystemClock
from workers.errors import StorageUnavailable, Unsupported
from workers.kv.base import Key, check_value, encode_key, ttl_ms
from workers.storage.sql.database import Database
from workers.storage.sql.direct import Executor
from workers.storage.sql.rows import Transaction, milliseconds
from workers.storage.sql.target import parse_target

T = TypeVar("T")

Values: TypeAlias = Mapping[str, bytes | int]

SWEPT_BY_A_WRITE: Final = 10

metadata: Final = MetaData()

# Bytes, because PostgreSQL's text has no NUL. Times are milliseconds since 1970, UTC.
Table(
    "workers_kv",
    metadata,
    Column("key", LargeBinary, primary_key=True),
    Column("value", LargeBinary, nullable=False),
    Column("expires_at", BigInteger, nullable=False, index=True),
)

_NOW: Final = {"sqlite": ":now", "postgresql": "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint)"}
_SKIP: Final = {"sqlite": "", "postgresql": " FOR UPDATE SKIP LOCKED"}


def _by_dialect(statement: str) -> Mapping[str, TextClause]:
    return {
        dialect: text(statement.replace("{now}", now).replace("{skip}", _SKIP[dialect]))
        for dialect, now in _NOW.items()
    }


_GET = _by_dialect("SELECT value FROM workers_kv WHERE key = :key AND expires_at > {now}")
_HELD = _by_dialect("SELECT value FROM workers_kv WHERE key = :key")
_PUT = (
    "INSERT INTO workers_kv (key, value, expires_at) VALUES (:key, :value, {now} + :ttl)"
    " ON CONFLICT (key) DO UPDATE SET value = excluded.value, expires_at = excluded.expires_at"
)
_SET = _by_dialect(_PUT)
_SET_IF_ABSENT = _by_dialect(f"{_PUT} WHERE workers_kv.expires_at <= {{now}}")
_COMPARE_AND_SET = _by_dialect(
    "UPDATE workers_kv SET value = :value, expires_at = {now} + :ttl"
    " WHERE key = :key AND value = :expected AND expires_at > {now}"
)
_COMPARE_AND_DELETE = _by_dialect(
    "DELETE FROM workers_kv WHERE key = :key AND value = :expected AND expires_at > {now}"
)
_SWEEP = _by_dialect(
    "DELETE FROM workers_kv WHERE key IN"
    " (SELECT key FROM workers_kv WHERE expires_at <= {now} ORDER BY expires_at LIMIT :limit{skip})"
)


class SqlKvStore:
    """A `ConditionalKvStore` in the table `workers_kv` of an SQLite file or a PostgreSQL database; `migrate` makes it.

    `target` and `busy_timeout` are as for `SqlStorage`; the store shares its connections with `SqlStorage` objects on
    the same database. PostgreSQL's own clock decides there; `clock` replaces the machine's on SQLite.

    Raises:
        StorageError: the URL is malformed, or names no SQLite file.
        Unsupported: another database than these, or a `clock` for PostgreSQL.
    """

    def __init__(
        self,
        target: str | URL | Engine | AsyncEngine,
        *,
        clock: Clock | None = None,
        busy_timeout: timedelta = timedelta(seconds=10),
    ) -> None:
        self._target = parse_target(target, busy_timeout)
        if clock is not None and self._target.capabilities.clock == "server":
            raise Unsupported("PostgreSQL's own clock decides what has expired; leave `clock` out")
        self._clock: Clock = clock or SystemClock()
        self._users = 0
        self._connected: Database | None = None

    def __repr__(self) -> str:
        return f"SqlKvStore({self._target.url!r})"

    async def migrate(self) -> None:
        """Create the table, and the SQLite file, unless they exist. Any number of processes may do so at once.

        Raises:
            StorageError: there is no place for it.
            StorageUnavailable: the server did not answer, or another connection held its transaction too long.
        """
        await asyncio.to_thread(self._target.migrate, metadata.create_all)

    async def connect(self) -> None:
        """Make sure that the table can be read. Counted: each call needs one `disconnect`.

        Raises:
            StorageError: it is missing.
        """
        database = self._target.acquire()
        try:
            probe: Values = {"key": b"", "now": 0}
            await asyncio.wrap_future(database.look(self._begin, partial(_value, statements=_GET, values=probe)))
        except BaseException:
            await database.release()
            raise
        self._users += 1
        self._connected = database

    async def disconnect(self) -> None:
        """Give up one use; with the last one its connections are closed, unless others share them."""
        database = self._connected
        if database is None:
            return
        self._users -= 1
        if not self._users:
            self._connected = None
        await database.release()

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.disconnect()

    async def get(self, key: Key) -> bytes | None:
        look = partial(_value, statements=_GET, values=self._values(key))
        return await asyncio.wrap_future(self._database().look(self._begin, look))

    async def set(self, key: Key, value: bytes, *, ttl: timedelta) -> None:
        check_value(value)
        await self._change(partial(_write, statements=_SET, values=self._values(key, value=value, ttl=ttl_ms(ttl))))

    async def set_if_absent(self, key: Key, value: bytes, *, ttl: timedelta) -> bytes | None:
        check_value(value)
        values = self._values(key, value=value, ttl=ttl_ms(ttl))
        return await self._change(partial(_set_if_absent, values=values))

    async def compare_and_set(self, key: Key, expected: bytes, value: bytes, *, ttl: timedelta) -> bool:
        check_value(value)
        values = self._values(key, expected=expected, value=value, ttl=ttl_ms(ttl))
        return await self._change(partial(_write, statements=_COMPARE_AND_SET, values=values))

    async def compare_and_delete(self, key: Key, expected: bytes) -> bool:
        values = self._values(key, expected=expected)
        return await self._change(partial(_write, statements=_COMPARE_AND_DELETE, values=values))

    def _values(self, key: Key, **more: bytes | int) -> Values:
        return {"key": encode_key(key).encode(), "now": milliseconds(self._clock.now()), **more}

    def _database(self) -> Database:
        if self._connected is None:
            raise StorageUnavailable(f"{self!r} is not connected; call `await store.connect()` first")
        return self._connected

    async def _change(self, work: Callable[[Transaction], T]) -> T:
        database = self._database()
        database.refuse_nested()
        return await asyncio.wrap_future(database.change(self._begin, work))

    def _begin(self, connection: Executor) -> Transaction:
        return Transaction(connection=connection, queue=0, clock=lambda _: milliseconds(self._clock.now()))


def _value(transaction: Transaction, *, statements: Mapping[str, TextClause], values: Values) -> bytes | None:
    found = transaction.connection.execute(statements[transaction.dialect], values).scalar()
    return None if found is None else bytes(found)


def _write(transaction: Transaction, *, statements: Mapping[str, TextClause], values: Values) -> bool:
    """Run the statement and return whether it changed its row; if it did, remove a few expired rows too."""
    changed = transaction.connection.execute(statements[transaction.dialect], values).rowcount > 0
    if changed:
        transaction.connection.execute(_SWEEP[transaction.dialect], {"now": values["now"], "limit": SWEPT_BY_A_WRITE})
    return changed


def _set_if_absent(transaction: Transaction, *, values: Values) -> bytes | None:
    if _write(transaction, statements=_SET_IF_ABSENT, values=values):
        return None
    # The statement has locked the row that it found, so that row still exists, even if it has expired by now.
    return _value(transaction, statements=_HELD, values=values)
