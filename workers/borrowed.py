"""SQLAlchemy connections on DB-API connections of somebody else, also Django's, whose transactions stay theirs.

Theory of operation. The dialects here are SQLAlchemy's own, but that they begin, commit, roll back and close nothing,
and change nothing on the connection they are given: what runs on it is part of the transaction that its owner has open.
One engine per database serves them all, so that statements are compiled once.
"""

from __future__ import annotations

import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, TypeAlias, TypeGuard, cast

from sqlalchemy import URL, Connection, DateTime, Dialect, Engine, create_engine
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg, PGExecutionContext_psycopg
from sqlalchemy.dialects.sqlite import DATETIME
from sqlalchemy.dialects.sqlite.base import SQLiteExecutionContext
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.engine.interfaces import DBAPIConnection, DBAPICursor
from sqlalchemy.pool import NullPool

if TYPE_CHECKING:
    import psycopg

DbApiConnection: TypeAlias = "sqlite3.Connection | psycopg.Connection[Any]"


class _Borrowed:
    """Leaves transactions and closing to the connection's owner."""

    def do_begin(self, dbapi_connection: object) -> None:
        """Do nothing: the owner has begun."""

    def do_commit(self, dbapi_connection: object) -> None:
        """Do nothing: the owner commits."""

    def do_rollback(self, dbapi_connection: object) -> None:
        """Do nothing: the owner rolls back."""

    def do_close(self, dbapi_connection: object) -> None:
        """Do nothing: the owner closes."""

    def do_terminate(self, dbapi_connection: object) -> None:
        """Do nothing: the owner closes."""

    def get_default_isolation_level(self, dbapi_conn: object) -> NoReturn:
        """Ask for none, by cursors of the owner's kind: nothing here would set it back."""
        raise NotImplementedError  # by which a dialect of SQLAlchemy says that there is no default

    def on_connect(self) -> Callable[[DBAPIConnection], None]:
        """Install no functions and no handlers for notices."""
        return lambda _: None


class _AnyDateTime(DATETIME):
    """A time, which the driver may have parsed: Django's connections have it do so. It is written as by everybody."""

    def result_processor(self, dialect: Dialect, coltype: object) -> Any:
        parsed = super().result_processor(dialect, coltype)
        return lambda value: value if parsed is None or isinstance(value, datetime) else parsed(value)


class _SqliteContext(SQLiteExecutionContext):
    def create_default_cursor(self) -> DBAPICursor:
        """Open a cursor whose rows are tuples, whatever the connection's owner likes to read."""
        cursor: Any = super().create_default_cursor()  # Any: of the driver, which has more than DB-API
        cursor.row_factory = None
        return cast(DBAPICursor, cursor)


class BorrowedSqlite(_Borrowed, SQLiteDialect_pysqlite):
    """SQLite through the standard library's driver."""

    driver = "borrowed"
    supports_statement_cache = True
    execution_ctx_cls = _SqliteContext
    colspecs = {**SQLiteDialect_pysqlite.colspecs, DateTime: _AnyDateTime}  # noqa: RUF012 - SQLAlchemy's own is none


class _PostgresContext(PGExecutionContext_psycopg):
    def create_default_cursor(self) -> DBAPICursor:
        """Open a cursor whose rows are tuples, whatever the connection's owner likes to read."""
        from psycopg.rows import tuple_row

        cursor: Any = super().create_default_cursor()  # Any: likewise
        cursor.row_factory = tuple_row
        return cast(DBAPICursor, cursor)


class BorrowedPostgres(_Borrowed, PGDialect_psycopg):
    """PostgreSQL through psycopg 3."""

    driver = "borrowed"
    supports_statement_cache = True
    execution_ctx_cls = _PostgresContext


registry.register("sqlite.borrowed", __name__, "BorrowedSqlite")
registry.register("postgresql.borrowed", __name__, "BorrowedPostgres")

_lent: Final[ContextVar[DbApiConnection]] = ContextVar("lent")
_lock = threading.Lock()
_engines: Final[dict[URL, Engine]] = {}


def is_dbapi_connection(value: object) -> TypeGuard[DbApiConnection]:
    """Tell whether it is a connection of `sqlite3` or psycopg 3."""
    psycopg = sys.modules.get("psycopg")
    return isinstance(value, sqlite3.Connection) or (psycopg is not None and isinstance(value, psycopg.Connection))


def in_transaction(connection: DbApiConnection) -> bool:
    """Tell whether a write can be rolled back: a transaction is open, or begins with the first write."""
    if isinstance(connection, sqlite3.Connection):
        return connection.in_transaction or connection.isolation_level is not None
    return not connection.autocommit or connection.info.transaction_status != 0


class DjangoConnection(Protocol):
    """The part of `django.db.connection` that is used here."""

    alias: str
    connection: DbApiConnection
    in_atomic_block: bool

    def on_commit(self, func: Callable[[], None]) -> None: ...


def django_connection(caller: object) -> DjangoConnection | None:
    """Return `caller` if it is Django's connection, and None if it is something else.

    Raises:
        ValueError: it is in no `transaction.atomic` block, or uses another driver than we support.
    """
    wrapper = getattr(sys.modules.get("django.db.backends.base.base"), "BaseDatabaseWrapper", ())
    proxy = getattr(sys.modules.get("django.utils.connection"), "ConnectionProxy", ())
    if not isinstance(caller, (wrapper, proxy)):
        return None
    found = cast(DjangoConnection, caller)
    if not found.in_atomic_block:
        raise ValueError(
            f"Django's connection {found.alias!r} is in autocommit; call this in a block of that very one:"
            f" `with transaction.atomic(using={found.alias!r}):`"
        )
    if not is_dbapi_connection(found.connection):
        driver = type(found.connection).__module__
        raise ValueError(f"Django's connection is one of {driver}; only sqlite3's and psycopg 3's are written through")
    return found


def check_transaction(connection: DbApiConnection) -> None:
    """Accept a connection whose writes can be rolled back.

    Raises:
        ValueError: it is in autocommit.
    """
    if not in_transaction(connection):
        raise ValueError("this connection is in autocommit; begin a transaction, for what is written to be part of it")


@contextmanager
def joined(caller: object) -> Iterator[object]:
    """Yield what SQLAlchemy joins the caller's transaction by; what is no connection of these is yielded as it is.

    Raises:
        ValueError: the connection is in autocommit, or Django's uses another driver than we support.
    """
    django = django_connection(caller)
    lent = caller if django is None else django.connection
    if not is_dbapi_connection(lent):
        yield lent
        return
    check_transaction(lent)
    with borrowed(lent) as connection:
        yield connection


@contextmanager
def borrowed(lent: DbApiConnection) -> Iterator[Connection]:
    """Yield a connection in the transaction that `lent` is in."""
    engine = _engine(lent)
    token = _lent.set(lent)
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        _lent.reset(token)


def _engine(lent: DbApiConnection) -> Engine:
    url = _url(lent)
    with _lock:
        engine = _engines.get(url)
        if engine is None:
            engine = _engines[url] = create_engine(
                url,
                creator=_lent.get,
                poolclass=NullPool,
                hide_parameters=True,
                **({} if url.get_backend_name() == "sqlite" else {"use_native_hstore": False}),
            )
        return engine


def _url(lent: DbApiConnection) -> URL:
    """Return what tells its database from others, and never a password."""
    if isinstance(lent, sqlite3.Connection):
        looking = lent.cursor()
        looking.row_factory = None  # the owner's may make anything of a row
        return URL.create("sqlite+borrowed", database=looking.execute("PRAGMA database_list").fetchone()[2])
    info = lent.info
    return URL.create("postgresql+borrowed", host=info.host, port=info.port, database=info.dbname)
