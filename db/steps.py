"""Statements that follow each other without a word to the event loop in between: one step of a task for all.

SQLAlchemy's asynchronous connections change greenlets at each step, and its SQLite driver changes threads as well,
several times for each statement. Under load every change of threads waits for the interpreter lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias, TypeVar

from sqlalchemy import URL, Connection, Engine, Row, Select
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import greenlet_spawn

from db.engines import SQLITE_READERS, sqlite_engines, unwrapped

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
