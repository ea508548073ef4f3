"""Engines for both databases: how connections are opened, pooled, and how their transactions begin."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sqlite3
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from sqlalchemy import URL, Connection, Dialect, Engine, create_engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection, ExceptionContext
from sqlalchemy.exc import DBAPIError, InvalidatePoolError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry, NullPool, PoolProxiedConnection

from db.poolers import refuse_lent_sessions

SQLITE_READERS: Final = 8
"""So many queries at a time, by each way of asking them."""

_BUSY_TIMEOUT = timedelta(seconds=30)
_CONNECT_TIMEOUT = timedelta(seconds=10)
_COMMANDS_CONNECT_TIMEOUT = timedelta(seconds=5)
"""Shorter, as somebody waits who wants to be told within ten seconds."""
_GONE: Final = {
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,  # milliseconds
}
"""When the kernel gives up a server that is gone, for libpq."""
_PING_AFTER = timedelta(seconds=1)
_SETTINGS: Final = {
    "array_nulls": "on",
    "bytea_output": "hex",
    "client_encoding": "UTF8",
    "DateStyle": "ISO, MDY",
    "default_transaction_isolation": "read committed",
    "extra_float_digits": "1",
    "IntervalStyle": "postgres",
    "standard_conforming_strings": "on",
    "TimeZone": "UTC",
}
"""Else a role or a database may have settings with which values are written or read as others, or not at all."""
_WRITER_SETTINGS: Final = {**_SETTINGS, "idle_in_transaction_session_timeout": "60s"}
"""A transaction whose connection is lost must not hold its locks until the server's kernel notices."""
POSTGRES_CONNECTIONS: Final = 20
"""How many a process opens at most."""


def async_engines(url: URL, *, sqlite_driver: object | None = None) -> tuple[AsyncEngine, AsyncEngine]:
    """Return a writer and a reader for `url`; the reader's transactions refuse to write.

    SQLite admits one writer at a time, so its writer has one connection: tasks of this process queue for it in order
    instead of polling the file lock, and `busy_timeout` is left to the contention of other processes. PostgreSQL's
    reader and writer share one pool. `sqlite_driver` stands in for aiosqlite, as SQLAlchemy's dialect wraps that.

    Statements carry payloads, which must not reach a log through an exception: `hide_parameters` keeps SQLAlchemy
    from showing them, `_shorten_errors` PostgreSQL.
    """
    if url.get_backend_name() == "sqlite":
        writer = _sqlite_engine(url, connections=1, driver=sqlite_driver)
        reader = _sqlite_engine(url, connections=SQLITE_READERS, driver=sqlite_driver)
        _prepare_writer(writer.sync_engine)
        _undo_when_cancelled(writer.sync_engine)
        _prepare_reader(reader.sync_engine)
        return writer, reader
    writer = create_async_engine(
        url,
        hide_parameters=True,
        pool_size=POSTGRES_CONNECTIONS,
        max_overflow=0,
        pool_use_lifo=True,
        connect_args=_postgres_arguments(url),
    )
    _prepare_postgres(writer.sync_engine, _WRITER_SETTINGS)
    _limit_silence(writer.sync_engine)
    _ping_idle_connections(writer.sync_engine)
    _shorten_errors(writer.sync_engine)
    return writer, _with_options(writer, postgresql_readonly=True)


def sqlite_engines(url: URL) -> tuple[Engine, Engine]:
    """Return a synchronous writer with one connection, and a reader, for an SQLite file; any thread may use them."""
    reader = _threaded_sqlite(url, SQLITE_READERS)
    _prepare_reader(reader)
    return _sqlite_writer(url), reader


def _sqlite_writer(url: URL) -> Engine:
    writer = _threaded_sqlite(url, 1)
    _prepare_writer(writer)
    return writer


def _threaded_sqlite(url: URL, connections: int) -> Engine:
    return create_engine(
        url,
        hide_parameters=True,
        pool_size=connections,
        max_overflow=0,
        connect_args={**_sqlite_arguments(), "check_same_thread": False},
    )


def writing_engine(url: URL) -> Engine:
    """Return a synchronous engine for transactions of plain code, in any thread; as `async_engines` for coroutines."""
    if url.get_backend_name() == "sqlite":
        return _sqlite_writer(url)
    engine = create_engine(
        url,
        hide_parameters=True,
        pool_size=POSTGRES_CONNECTIONS,
        max_overflow=0,
        pool_use_lifo=True,
        connect_args=_postgres_arguments(url),
    )
    _prepare_postgres(engine, _WRITER_SETTINGS)
    _limit_silence(engine)
    _ping_idle_connections(engine)
    _shorten_errors(engine)
    return engine


def unwrapped(reader: AsyncEngine) -> AsyncEngine:
    """Return the same reader without a transaction around each query: three round trips become one.

    On PostgreSQL a statement that writes is not refused then; SQLite begins none for a query in any case.
    """
    return _with_options(reader, isolation_level="AUTOCOMMIT") if reader.dialect.name == "postgresql" else reader


def _with_options(engine: AsyncEngine, **options: object) -> AsyncEngine:
    """Return what `execution_options` would, but that a connection is closed if its task is cancelled just then.

    SQLAlchemy sets the options of an engine before anything refers to the connection that was taken from the pool. As
    psycopg lets the event loop run meanwhile, it would be left open, for the garbage collector to warn of.
    """
    same = engine.execution_options()

    @event.listens_for(same.sync_engine, "engine_connect")
    def set_options(connection: Connection) -> None:
        try:
            connection.execution_options(**options)
        except BaseException:
            connection.invalidate()
            connection.close()
            raise

    return same


def migration_engine(url: URL) -> Engine:
    """Return a synchronous engine whose DDL is transactional on both databases, unlike the SQLite driver's default."""
    if url.get_backend_name() == "sqlite":
        engine = create_engine(url, hide_parameters=True, connect_args=_sqlite_arguments())
        _prepare_writer(engine)
        _enable_write_ahead_log(engine)
        return engine
    engine = create_engine(url, hide_parameters=True, connect_args=_postgres_arguments(url, _COMMANDS_CONNECT_TIMEOUT))
    _prepare_postgres(engine)
    return engine


def reading_engine(url: URL, *, connect_timeout: timedelta = _CONNECT_TIMEOUT, at_leisure: bool = True) -> Engine:
    """Return a synchronous engine whose connections refuse to write, for long reads outside the application's pools.

    Each connection is opened when it is asked for and closed when it is given back. A PostgreSQL server that vanishes
    is noticed within a minute; one that is silent, as it is over a long query, only if that is not `at_leisure`.
    """
    if url.get_backend_name() == "sqlite":
        engine = create_engine(url, hide_parameters=True, poolclass=NullPool, connect_args=_sqlite_arguments())
        _prepare_reader(engine)
        return engine
    engine = create_engine(
        url,
        hide_parameters=True,
        poolclass=NullPool,
        connect_args=_postgres_arguments(url, connect_timeout),
        execution_options={"postgresql_readonly": True},
    )
    _prepare_postgres(engine)
    if not at_leisure:
        _limit_silence(engine)
    _shorten_errors(engine)
    return engine


def _sqlite_engine(url: URL, *, connections: int, driver: object | None) -> AsyncEngine:
    return create_async_engine(
        url.set(drivername="sqlite+aiosqlite"),
        hide_parameters=True,
        pool_size=connections,
        max_overflow=0,
        connect_args=_sqlite_arguments(),
        **({} if driver is None else {"module": driver}),
    )


def _sqlite_arguments() -> dict[str, object]:
    # isolation_level None: the driver begins no transaction by itself, `_prepare_writer` does.
    return {"timeout": _BUSY_TIMEOUT.total_seconds(), "isolation_level": None}


def _postgres_arguments(url: URL, connect_timeout: timedelta = _CONNECT_TIMEOUT) -> dict[str, object]:
    """Return what libpq is told beside what the URL says."""
    ours = {"connect_timeout": max(2, int(connect_timeout.total_seconds())), **_GONE}
    return {name: value for name, value in ours.items() if name not in url.query}


def _prepare_postgres(engine: Engine, settings: Mapping[str, str] = _SETTINGS) -> None:
    """Give each session of this PostgreSQL engine its settings, by a statement: PgBouncer refuses them as options."""
    statement = "SELECT " + ", ".join(f"set_config('{name}', '{value}', false)" for name, value in settings.items())

    # Before SQLAlchemy looks at the first session, as it writes texts by what that has.
    @event.listens_for(engine, "connect", insert=True)
    def configure(connection: DBAPIConnection, _record: ConnectionPoolEntry) -> None:
        try:
            cursor = connection.cursor()
            cursor.execute(statement)
            cursor.close()
            connection.commit()  # a rollback would undo what was set
        except BaseException:
            connection.close()  # nobody else knows it yet
            raise

    refuse_lent_sessions(engine)  # before the session, which would be another's, has its settings


def _limit_silence(engine: Engine) -> None:
    """Open connections of this PostgreSQL engine that close themselves when the server is silent for too long."""

    @event.listens_for(engine, "do_connect")
    def connect(
        dialect: Dialect, _record: ConnectionPoolEntry, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> object:
        from db.silence import PlainConnection, TaskConnection  # psycopg is an extra

        if dialect.is_async:
            options["async_creator_fn"] = TaskConnection.connect
            return None  # the dialect opens it
        return PlainConnection.connect(*arguments, **options)


def _prepare_writer(engine: Engine) -> None:
    """Make transactions of this SQLite engine take the write lock before they read.

    A deferred transaction that reads and then writes fails at once, whatever the busy timeout, if another connection
    wrote in between.
    """
    _set_pragmas(engine, "synchronous = NORMAL", "foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")


_undoing: set[asyncio.Task[None]] = set()


def _undo_when_cancelled(engine: Engine) -> None:
    """Make a transaction of this SQLite engine give up the write lock when it is cancelled in a statement.

    SQLAlchemy closes the connection. SQLite waits with that until the last cursor is forgotten, and the exception that
    ended the statement holds a cursor for as long as anybody holds the exception.
    """

    @event.listens_for(engine, "invalidate")
    def undo(connection: DBAPIConnection, _record: ConnectionPoolEntry, _error: BaseException | None) -> None:
        async def roll_back() -> None:
            with contextlib.suppress(ValueError, sqlite3.Error):  # it is closed already
                await connection.driver_connection.rollback()

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # forgotten, not cancelled
        # Not awaited: a second cancellation must not keep the connection from being closed. Begun before that is.
        task = loop.create_task(roll_back())
        _undoing.add(task)
        task.add_done_callback(_undoing.discard)


def _prepare_reader(engine: Engine) -> None:
    """Make queries of this SQLite engine run outside transactions, each on what is committed, as on PostgreSQL."""
    _set_pragmas(engine, "query_only = ON")


def _enable_write_ahead_log(engine: Engine) -> None:
    """Put the file into WAL mode, in which it stays for everyone who opens it later.

    When several processes switch a fresh file at once, SQLite refuses all but one, whatever the busy timeout.
    """

    @event.listens_for(engine, "connect")
    def switch(connection: DBAPIConnection, _record: ConnectionPoolEntry) -> None:
        deadline = time.monotonic() + _BUSY_TIMEOUT.total_seconds()
        cursor = connection.cursor()
        while True:
            try:
                cursor.execute("PRAGMA journal_mode = WAL")
                break
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
            time.sleep(0.01)
        cursor.close()


def _set_pragmas(engine: Engine, *pragmas: str) -> None:
    @event.listens_for(engine, "connect")
    def configure(connection: DBAPIConnection, _record: ConnectionPoolEntry) -> None:
        cursor = connection.cursor()
        for pragma in pragmas:
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()


def _shorten_errors(engine: Engine) -> None:
    """Cut the errors of this PostgreSQL engine's statements down to one line that says what is wrong.

    The lines after it (DETAIL, CONTEXT) quote the row, and so a payload. They stay in the driver's `diag`.
    """

    @event.listens_for(engine, "handle_error")
    def shorten(context: ExceptionContext) -> None:
        error, wrapper = context.original_exception, context.sqlalchemy_exception
        if context.statement is not None and isinstance(wrapper, DBAPIError):
            whole = str(error)
            first_line = whole.partition("\n")[0]
            error.args = (first_line,)
            wrapper.args = (str(wrapper.args[0]).replace(whole, first_line),)


def _ping_idle_connections(engine: Engine) -> None:
    """Try a connection that lay idle before it is used; if it is dead, replace it and all that are older.

    The pool's own `pre_ping` does so at every checkout, which costs a busy worker a fifth of its throughput.
    """

    @event.listens_for(engine, "checkin")
    def remember(_connection: DBAPIConnection | None, record: ConnectionPoolEntry) -> None:
        record.info["idle_since"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def ping(connection: DBAPIConnection, record: ConnectionPoolEntry, _proxy: PoolProxiedConnection) -> None:
        idle_since = record.info.get("idle_since", math.inf)
        if time.monotonic() - idle_since < _PING_AFTER.total_seconds():
            return
        from db.silence import impatient  # psycopg is an extra

        try:
            with impatient(record.driver_connection):
                engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as error:
            raise InvalidatePoolError from error
