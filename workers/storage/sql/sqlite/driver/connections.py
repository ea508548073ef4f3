"""Connections to an SQLite file, set up for writers, readers and sessions; and our own statements on the driver.

Writers take the write lock as a transaction begins (`BEGIN IMMEDIATE`), and do the waiting for it themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sqlite3
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final, TypeVar

from sqlalchemy import URL, AsyncAdaptedQueuePool, Connection, Engine, NullPool, create_engine, event, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.util import await_only

from workers.errors import StorageError
from workers.storage.sql.direct import Answer, Direct, Values
from workers.storage.sql.errors import is_busy, translate


class SqliteDirect(Direct):
    """See `Direct`."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        found: object = connection.connection.dbapi_connection
        assert isinstance(found, sqlite3.Connection)
        self._driver = found

    def _once(self, sql: str, values: Values) -> Answer:
        return _answer(sql, lambda: self._driver.execute(sql, values))

    def _for_each(self, sql: str, values: Sequence[Values]) -> Answer:
        return _answer(sql, lambda: self._driver.executemany(sql, values))


def _answer(sql: str, carry_out: Callable[[], sqlite3.Cursor]) -> Answer:
    try:
        cursor = carry_out()
        if cursor.description is None:
            return Answer((), (), cursor.rowcount)
        return Answer(tuple([column[0] for column in cursor.description]), cursor.fetchall(), cursor.rowcount)
    except sqlite3.Error as error:
        raise DBAPIError(sql, None, error, hide_parameters=True) from error


T = TypeVar("T")

_BEGIN: Final = text("BEGIN IMMEDIATE")
_DATA_VERSION: Final = text("PRAGMA data_version")
_BUSY_PAUSE: Final = (0.000_5, 0.002)
_undoing: set[asyncio.Task[None]] = set()  # the event loop itself keeps no strong reference


def open_writer(path: str, busy_timeout: timedelta) -> Connection:
    """Open a connection to the file, made if missing, whose transactions take the write lock as they begin."""
    if sqlite3.sqlite_version_info < (3, 35):
        raise StorageError(f"SQLite {sqlite3.sqlite_version} is too old: 3.35 is the first with RETURNING")
    connection = connect(path, busy_timeout)
    try:
        # The first switch to a write-ahead log needs exclusive access, and SQLite does not wait for that by itself.
        mode = _retry_while_busy(lambda: pragma(connection, "journal_mode = WAL"), busy_timeout)
        if mode != "wal":
            raise StorageError(f"{path!r} cannot have a write-ahead log (journal mode {mode}); use a local file system")
        pragma(connection, "synchronous = NORMAL")
        # SQLite's own waiting sleeps up to 100 ms at a time, so a busy process would starve the others: `begin` waits.
        pragma(connection, "busy_timeout = 0")
    except BaseException:
        connection.close()
        raise

    _begin_as_writer(
        connection,
        path,
        busy_timeout,
        begin=lambda connection: SqliteDirect(connection).execute(_BEGIN),
        pause=time.sleep,
    )
    return connection


def _begin_as_writer(
    target: Connection | Engine,
    path: str,
    busy_timeout: timedelta,
    *,
    begin: Callable[[Connection], object],
    pause: Callable[[float], object],
) -> None:
    """Let every transaction of `target` take the write lock, by `begin`, as it begins."""
    opened = _file(path)

    def begin_or_wait(connection: Connection) -> None:
        # A file that was deleted or replaced accepts writes without an error, and nobody would ever see them.
        if _file(path) != opened:
            raise StorageError(f"SQLite database {path!r} was deleted or replaced while in use; start again")
        _retry_while_busy(lambda: begin(connection), busy_timeout, pause=pause)

    event.listen(target, "begin", begin_or_wait)


def _file(path: str) -> tuple[int, int] | None:
    """Identify the file that is at `path` now."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _retry_while_busy(
    work: Callable[[], T], busy_timeout: timedelta, *, pause: Callable[[float], object] = time.sleep
) -> T:
    deadline = time.monotonic() + busy_timeout.total_seconds()
    while True:
        try:
            return work()
        except DBAPIError as error:
            if not is_busy(error) or time.monotonic() >= deadline:
                raise
        pause(random.uniform(*_BUSY_PAUSE))  # noqa: S311 - spreads retries, protects nothing


def pragma(connection: Connection, name: str) -> object:
    """Return what the pragma answers, None for nothing. Only to be called outside transactions."""
    try:
        result = connection.exec_driver_sql(f"PRAGMA {name}")
        return result.scalar() if result.returns_rows else None
    finally:
        connection.rollback()


def data_version(connection: Connection) -> int:
    """Return a number that is another one when another connection has committed to the file since the last call."""
    return int(SqliteDirect(connection).execute(_DATA_VERSION).scalar_one())


def connect(path: str, busy_timeout: timedelta) -> Connection:
    """Open a connection whose transactions begin only when told to."""
    engine = create_engine(
        URL.create("sqlite+pysqlite", database=path),
        poolclass=NullPool,
        hide_parameters=True,
        # With isolation_level None the driver begins no transaction by itself.
        # One thread at a time uses it, but not always the same one.
        connect_args={
            "timeout": busy_timeout.total_seconds(),
            "isolation_level": None,
            "check_same_thread": False,
        },
    )
    return engine.connect()


def async_engine(path: str, busy_timeout: timedelta) -> AsyncEngine:
    """Make an engine with one connection, for which tasks queue up: there is only one writer at a time anyway."""
    engine = create_async_engine(
        URL.create("sqlite+aiosqlite", database=path),
        hide_parameters=True,
        poolclass=AsyncAdaptedQueuePool,
        pool_size=1,
        max_overflow=0,
        pool_timeout=busy_timeout.total_seconds(),
        connect_args={"timeout": 0, "isolation_level": None},
    )

    def configure(connection: DBAPIConnection, _record: ConnectionPoolEntry) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA synchronous = NORMAL")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    event.listen(engine.sync_engine, "connect", configure)
    # This runs in the event loop, so the waiting must be awaited.
    _begin_as_writer(
        engine.sync_engine,
        path,
        busy_timeout,
        begin=lambda connection: connection.execute(_BEGIN),
        pause=lambda seconds: await_only(asyncio.sleep(seconds)),
    )
    undo_when_cancelled(engine)
    return engine


def undo_when_cancelled(engine: AsyncEngine) -> None:
    """Let a transaction of this SQLite engine give up the write lock when it is cancelled in a statement.

    SQLAlchemy closes its connection, but SQLite itself waits until the last cursor is freed. A handler's cursor lives
    as long as the exception that ended it: until the job is settled, which needs the lock.
    """
    if not event.contains(engine.sync_engine, "invalidate", _undo):
        event.listen(engine.sync_engine, "invalidate", _undo)


def _undo(connection: DBAPIConnection, _record: ConnectionPoolEntry, _error: BaseException | None) -> None:
    async def undo() -> None:
        with contextlib.suppress(ValueError, sqlite3.Error):  # already closed, or never begun
            await connection.driver_connection.rollback()

    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return  # forgotten rather than cancelled
    # Not awaited: a second cancellation must not keep the connection from being closed. It begins before the closing.
    undoing = loop.create_task(undo())
    _undoing.add(undoing)
    undoing.add_done_callback(_undoing.discard)


def migrate(path: str, busy_timeout: timedelta, make_tables: Callable[[Connection], None]) -> None:
    """Make the file, if it is missing, and the tables. Processes that migrate at once do so one after another.

    A file made here is accessible to its owner alone (0600), and so are the files that SQLite puts beside it.
    """
    name = f"SQLite database {path!r}"
    with contextlib.suppress(OSError):  # it exists, or SQLite will say what is wrong
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode=0o600))
    try:
        connection = open_writer(path, busy_timeout)
        try:
            with connection.begin():
                make_tables(connection)
        finally:
            connection.close()
    except DBAPIError as error:
        raise translate(error, name) from error
