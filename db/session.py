"""The application's door to its database: transactions that write, and sessions that only read.

One `Database` per process and event loop. A transaction begins with its first statement, not when the block is
entered; on SQLite it then holds the only write lock until the block ends, so nothing slow (the network, a queue)
belongs inside.

Steps are statements that follow each other without a word to the event loop in between. SQLAlchemy's asynchronous
connections change greenlets at each statement, and its SQLite driver changes threads as well, several times. Under load
every change of threads waits for the interpreter lock.

A caller may bring a session or connection of his own. `OwnDatabase` finds out which database that is on, whatever name
and address it was reached by.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, TypeVar
from weakref import WeakSet

from sqlalchemy import URL, BigInteger, Connection, Engine, Row, Select, cast, event, func, select, text
from sqlalchemy.engine.interfaces import DBAPIConnection, DBAPICursor
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.util import greenlet_spawn

from db.alone import Alone
from db.engines import SQLITE_READERS, async_engines, reading_engine, sqlite_engines, unwrapped, writing_engine
from db.url import parse_url

T = TypeVar("T")
Query: TypeAlias = Select[*tuple[Any, ...]]
Rows: TypeAlias = Sequence[Row[*tuple[Any, ...]]]


class Steps(Protocol):
    """Transactions and queries that await nothing."""

    async def transact(self, work: Callable[[Connection], T]) -> T:
        """Commit what `work` does, or undo it if it raises."""

    async def rows(self, query: Query, values: Mapping[str, object] | None) -> Rows:
        """Return what one query finds among what was committed."""

    async def close(self) -> None:
        """Release everything; nothing may be asked of it any more. A second call does nothing."""


class Greenlets:
    """All steps in one greenlet, which an asynchronous driver's waiting suspends."""

    def __init__(self, writer: AsyncEngine, reader: AsyncEngine) -> None:
        self._writer = writer.sync_engine
        self._queries = unwrapped(reader).sync_engine

    async def transact(self, work: Callable[[Connection], T]) -> T:
        return await greenlet_spawn(_transact, self._writer, work)

    async def rows(self, query: Query, values: Mapping[str, object] | None) -> Rows:
        return await greenlet_spawn(_rows, self._queries, query, values)

    async def close(self) -> None:
        """Do nothing: the engines are their owner's."""


class SqliteThreads:
    """All steps in one visit to a thread: one that writes, and some that read.

    A process writes through the only connection of `turns` as well. Holding it is the process's turn to write, so that
    transactions queue up in order instead of polling for the file's lock.
    """

    def __init__(self, url: URL, *, turns: AsyncEngine) -> None:
        self._turns = turns
        self._writer, self._reader = sqlite_engines(url)
        self._writing, self._reading = _threads(1), _threads(SQLITE_READERS)

    async def transact(self, work: Callable[[Connection], T]) -> T:
        async with self._turns.connect():
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._writing, _transact, self._writer, work)

    async def rows(self, query: Query, values: Mapping[str, object] | None) -> Rows:
        return await asyncio.get_running_loop().run_in_executor(self._reading, _rows, self._reader, query, values)

    async def close(self) -> None:
        for threads in (self._writing, self._reading):
            await asyncio.to_thread(threads.shutdown)
        self._writer.dispose()
        self._reader.dispose()


def _threads(most: int) -> ThreadPoolExecutor:
    """Make threads that start when they are needed."""
    return ThreadPoolExecutor(most, thread_name_prefix="sqlite")


def _transact(engine: Engine, work: Callable[[Connection], T]) -> T:
    with engine.begin() as connection:
        return work(connection)


def _rows(engine: Engine, query: Query, values: Mapping[str, object] | None) -> Rows:
    with engine.connect() as connection:
        return connection.execute(query, values).all()


_TIME: Final = select(func.clock_timestamp())


class Database:
    """Pooled sessions on an SQLite file or a PostgreSQL database; connections are opened on first use.

    `engines` are a writer and a reader of the same database in place of its own, see `async_engines`; `steps` are what
    `transact` and `rows` go through then, and end with it.
    Objects stay readable after their session ends: nothing is expired on commit.

    Raises:
        DatabaseUrlError: `url` is malformed, of another backend, or an SQLite URL without a file.
        RuntimeError: (of each method but `close`) it is closed.
    """

    def __init__(
        self, url: str, *, engines: tuple[AsyncEngine, AsyncEngine] | None = None, steps: Steps | None = None
    ) -> None:
        self._url = parse_url(url)
        self._writer, self._reader = engines or async_engines(self._url)
        self._write_sessions = async_sessionmaker(self._writer, expire_on_commit=False)
        self._read_sessions = async_sessionmaker(self._reader, expire_on_commit=False)
        self._steps: Steps = steps or (
            SqliteThreads(self._url, turns=self._writer)
            if engines is None and self._url.get_backend_name() == "sqlite"
            else Greenlets(self._writer, self._reader)
        )
        self._alone = Alone(self._writer)
        self.own = OwnDatabase(self._url)
        self.own.trust(self._writer.sync_engine)
        self._tasks_writing: set[asyncio.Task[object] | None] = set()
        self._is_closed = False
        for engine in (self._writer, self._reader):
            event.listen(engine.sync_engine, "checkin", self._close_if_late)

    def __repr__(self) -> str:
        return f"Database({self.own.name})"

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSession]:
        """Commit what the block did when it ends, and undo it if it raises.

        Not reentrant: an inner transaction of the same task would wait for the outer one, for ever on SQLite.

        Raises:
            RuntimeError: this task is inside `transaction()` already; hand its session on instead.
        """
        with self._writing():
            async with self._write_sessions() as session, session.begin():
                yield session

    async def transact(self, work: Callable[[Connection], T]) -> T:
        """Commit what `work` does on its connection, or undo it if it raises; at half the price of `transaction`.

        `work` cannot await, and on SQLite it runs in another thread, so it should only execute statements. A caller
        that is cancelled meanwhile does not know what became of it.

        Raises:
            RuntimeError: as for `transaction`.
        """
        with self._writing():
            return await self._steps.transact(work)

    async def rows(
        self, query: Select[*tuple[Any, ...]], values: Mapping[str, object] | None = None
    ) -> Sequence[Row[*tuple[Any, ...]]]:
        """Return what one query finds of what was committed, at a third of the price of `read`; wait for no writer."""
        self._require_open()
        return await self._steps.rows(query, values)

    async def alone(self, statement: str, values: Mapping[str, object]) -> Sequence[Any]:
        """Run one statement in the driver's own words, which may write, and return its rows, as the driver gives them.

        On PostgreSQL only, where it commits by itself: one round trip instead of three.

        Raises:
            RuntimeError: as for `transaction`.
        """
        assert not self.is_sqlite, "there a transaction is as cheap"
        with self._writing():
            return await self._alone.run(statement, values)

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        """Yield a session for queries alone: it waits for no writer, and the database refuses writes through it.

        Each query sees what was committed before it; two queries may see different states.
        """
        self._require_open()
        async with self._read_sessions() as session:
            yield session

    @property
    def is_sqlite(self) -> bool:
        """Tell whether statements have to be written in SQLite's dialect."""
        return self._url.get_backend_name() == "sqlite"

    @property
    def has_clock(self) -> bool:
        """Whether the database is a server with a clock of its own; SQLite has none but the machine's."""
        return not self.is_sqlite

    async def time(self) -> datetime:
        """Return the time by the database server's clock.

        Raises:
            SQLAlchemyError: it did not answer, or is SQLite.
        """
        [(now,)] = await self.rows(_TIME)
        told: datetime = now
        return told.astimezone(UTC)

    @property
    def is_in_transaction(self) -> bool:
        """Whether the running task is inside `transaction()` and may begin no other."""
        return asyncio.current_task() in self._tasks_writing

    async def close(self) -> None:
        """Close every idle connection and open no other, and those in use as soon as they are given back.

        A second call does nothing.
        """
        self._is_closed = True
        async with AsyncExitStack() as stack:  # each, though this may be cancelled in one of them
            for close in (self._writer.dispose, self._reader.dispose, self._alone.close, self._steps.close):
                stack.push_async_callback(close)

    def _close_if_late(self, _connection: DBAPIConnection | None, record: ConnectionPoolEntry) -> None:
        """Close a connection that is given back when its pool has been emptied: nobody else would."""
        if self._is_closed:
            record.invalidate()

    def _require_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(f"{self!r} is closed; its connections would be nobody's to close")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self._require_open()
        task = asyncio.current_task()
        if task in self._tasks_writing:
            raise RuntimeError("transaction() inside transaction() of the same task; pass the outer session on")
        self._tasks_writing.add(task)
        try:
            yield
        finally:
            self._tasks_writing.discard(task)


@contextmanager
def sqlite_cursor(connection: Connection) -> Iterator[DBAPICursor]:
    """Yield the driver's own cursor in the transaction, for statements that are shorter than SQLAlchemy's way to them.

    Raises:
        DBAPIError: what the driver raised, without the statement and its values.
    """
    cursor = connection.connection.cursor()
    try:
        yield cursor
    except sqlite3.Error as error:
        raise DBAPIError.instance(
            None, None, error, sqlite3.Error, hide_parameters=True, dialect=connection.dialect
        ) from error
    finally:
        cursor.close()


async def one_at_a_time(session: AsyncSession, *subject: str) -> None:
    """Make every other transaction that asks for the same *subject* wait here until this one ends.

    What the first one commits is visible to the queries of the next. The tables of existing nodes have no unique
    constraint on what a peer may repeat, and may hold repetitions already, so none can be added. SQLite needs no lock:
    its write transactions exclude each other from their first statement on.
    """
    if session.get_bind().dialect.name != "postgresql":
        return
    digest = hashlib.sha256("\0".join(subject).encode()).digest()
    key = int.from_bytes(digest[:8], "big", signed=True)
    await session.execute(select(func.pg_advisory_xact_lock(cast(key, BigInteger))))


Identity: TypeAlias = tuple[object, ...]

_FILES: Final = text("PRAGMA database_list")
_WHICH: Final = text(
    "SELECT system_identifier, oid FROM pg_control_system(), pg_database WHERE datname = current_database()"
)


class ForeignDatabase(ValueError):
    """The session or connection is on another database than the one its statements are for; nothing was written."""


class OwnDatabase:
    """Tells connections to the database of `url` from others; safe from any thread.

    An engine is looked at once: all its connections are taken to be on one database.
    """

    def __init__(self, url: URL) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._identity: Identity | None = None
        self._known: WeakSet[Engine] = WeakSet()

    @property
    def name(self) -> str:
        """Return what messages call it; never a password."""
        return _shown(self._url)

    def trust(self, engine: Engine) -> None:
        """Take connections of the engine to be on this database, without a look."""
        self._known.add(engine)

    def needs_a_look(self, engine: Engine) -> bool:
        """Tell whether `check` would have to learn first. An event loop should not wait for that."""
        return engine not in self._known and self._identity is None

    def learn(self) -> None:
        """Find out what to compare by. On PostgreSQL that takes a connection of its own, the first time."""
        with self._lock:
            if self._identity is None:
                self._identity = self._look()

    def check(self, connection: Connection) -> None:
        """Refuse a connection to another database. It may take a query in the caller's transaction.

        Raises:
            ForeignDatabase: it is one.
            ValueError: the connection is in autocommit, where a rollback would leave what was written.
        """
        if connection._is_autocommit_isolation():  # nothing public knows what its engine was made with
            raise ValueError("this connection is in autocommit; begin a transaction, for what is owed to be part of it")
        if connection.engine in self._known:
            return
        self.learn()
        if connection.dialect.name != self._url.get_backend_name() or _identity(connection) != self._identity:
            other = _shown(connection.engine.url)
            raise ForeignDatabase(
                f"this session is on another database, {other}; deliveries are owed in {self.name} (DATABASE_URL):"
                " pass a session on that one"
            )
        self._known.add(connection.engine)

    def _look(self) -> Identity:
        if self._url.get_backend_name() == "sqlite":
            return _file(self._url.database or "")
        engine = reading_engine(self._url, at_leisure=False)
        try:
            with engine.connect() as connection:
                return _identity(connection)
        finally:
            engine.dispose()


def _identity(connection: Connection) -> Identity:
    if connection.dialect.name == "sqlite":
        return _file(next(row.file for row in connection.execute(_FILES) if row.name == "main"))
    return tuple(connection.execute(_WHICH).one())


def _file(path: str) -> Identity:
    """Return one spelling for each file. Its inode would not do: another file may be put in its place."""
    return ("file", str(Path(path).resolve()) if path else "")


def _shown(url: URL) -> str:
    """Rebuild the URL from the parts that name the database: a password may hide in the query, too."""
    return URL.create(url.get_backend_name(), host=url.host, port=url.port, database=url.database).render_as_string()


class PlainDatabase:
    """Pooled synchronous sessions on an SQLite file or a PostgreSQL database; any thread may use them.

    A fork's child opens connections of its own and leaves the parent's alone.

    Raises:
        DatabaseUrlError: as `Database`.
    """

    def __init__(self, url: str) -> None:
        self._url = parse_url(url)
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._pid = os.getpid()
        self._thread = threading.local()

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """Commit what the block did when it ends, and undo it if it raises; see `Database.transaction`.

        Raises:
            RuntimeError: this thread is inside `transaction()` already; hand its session on instead.
        """
        if getattr(self._thread, "writing", False):
            raise RuntimeError("transaction() inside transaction() of the same thread; pass the outer session on")
        self._thread.writing = True
        try:
            with Session(self._opened(), expire_on_commit=False) as session, session.begin():
                yield session
        finally:
            self._thread.writing = False

    def close(self) -> None:
        """Close every idle connection; end the sessions first. A later transaction opens new ones."""
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.dispose(close=self._pid == os.getpid())

    def forget(self) -> None:
        """Leave the connections to the parent: this is the child of a fork."""
        self._lock = threading.Lock()  # another thread may have held it at the fork
        self._thread = threading.local()
        self._pid = os.getpid()
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.dispose(close=False)

    def _opened(self) -> Engine:
        if self._pid != os.getpid():
            self.forget()
        with self._lock:
            if self._engine is None:
                self._engine = writing_engine(self._url)
            return self._engine
