"""The application's door to its database: transactions that write, and sessions that only read.

One `Database` per process and event loop. A transaction begins with its first statement, not when the block is
entered; on SQLite it then holds the only write lock until the block ends, so nothing slow (the network, a queue)
belongs inside.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from sqlalchemy import URL, Connection, Row, Select, event, func, select
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.pool import ConnectionPoolEntry

from db.alone import Alone
from db.engines import async_engines
from db.identity import OwnDatabase
from db.steps import Greenlets, SqliteThreads, Steps
from db.url import parse_url

T = TypeVar("T")

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
        # Rebuilt from the parts that name the database: a password may hide in the query, too.
        shown = URL.create(
            self._url.get_backend_name(), host=self._url.host, port=self._url.port, database=self._url.database
        )
        return f"Database({shown})"

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
