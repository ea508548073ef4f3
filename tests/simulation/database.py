"""SQLite in memory and in the thread of whoever asks: the shipped statements, without threads, and with outages.

Theory of operation. SQLAlchemy's dialect for aiosqlite is given a driver whose calls are done when they return, so
nothing waits and nothing depends on threads. Engines, which keep compiled statements, are made once and lent to one
simulated process after another; what their connections open, and whether that answers, is looked up when they connect.
Sessions go through them; what needs none, which is most, goes to connections of its own, see `statements`.
A database of a seed is a copy of a migrated one.
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util.concurrency import await_, in_greenlet

from db import Database
from db.engines import async_engines
from db.migrate import upgrade
from db.session import Steps
from db.url import parse_url
from tests.simulation.loop import LoopClock
from tests.simulation.records import moment_of, tell_time, watch
from tests.simulation.statements import Compiling, Direct

AWAY: Final = "connection closed: the database is away"


@dataclass(slots=True, eq=False)
class Line:
    """Whether a simulated process reaches what it is connected to; a dead one reaches nothing."""

    is_cut: Callable[[], bool]


class _Connection(sqlite3.Connection):
    """Answers at once, or not at all."""

    space: Space
    line: Line
    _counted = 0

    @property
    def driver_connection(self) -> _Awaited:
        return _Awaited(self)

    def cursor(self, factory: Any = sqlite3.Cursor) -> Any:  # overloaded in sqlite3
        if in_greenlet():
            await_(_nothing())  # SQLAlchemy insists that an asynchronous driver awaits something
        self._require_answer()
        return super().cursor(factory)

    def commit(self) -> None:
        self._require_answer()
        if self._counted != self.total_changes:
            self._counted = self.total_changes
            self.space.changes += 1
        super().commit()

    def terminate(self) -> None:
        """The pool does not trust the connection any more."""
        self.close()

    def _require_answer(self) -> None:
        if self.line.is_cut():
            if self.in_transaction:
                super().rollback()
            raise sqlite3.OperationalError(AWAY)


async def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class _Awaited:
    """What engines roll back when a transaction is cancelled."""

    connection: sqlite3.Connection

    async def rollback(self) -> None:
        sqlite3.Connection.rollback(self.connection)


@dataclass(slots=True, eq=False)
class Space:
    """One database in memory; `changes` counts the commits that changed a row."""

    name: str
    keeper: sqlite3.Connection
    clock: LoopClock
    changes: int = 0
    _found: dict[str, tuple[int, list[Any]]] = field(default_factory=dict)

    @classmethod
    def open(cls, name: str, clock: LoopClock) -> Space:
        """A fresh database with all tables, whose times are those of `clock`."""
        keeper = sqlite3.connect(_uri(name), uri=True, isolation_level=None)
        keeper.execute("PRAGMA read_uncommitted = ON")
        _template().backup(keeper)
        tell_time(keeper, clock.elapsed)
        return cls(name=name, keeper=keeper, clock=clock)

    def close(self) -> None:
        """The database is gone, with its last connection."""
        self.keeper.close()

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """What a query of the judge finds, whether the database answers others or not."""
        return self.keeper.execute(query, values).fetchall()

    def first_due(self, query: str) -> float:
        """The time of the loop in the only row and column that `query` finds; infinite if it is null."""
        due: float = self._known(query, self._due)[0]
        return due

    def dues(self, query: str) -> list[tuple[str, float]]:
        """Each name that `query` finds, and the time of the loop beside it."""
        return self._known(query, self._named_due)

    def _known(self, query: str, read: Callable[[tuple[Any, ...]], Any]) -> list[Any]:
        known = self._found.get(query)
        if known is None or known[0] != self.changes:
            known = self._found[query] = (self.changes, [read(row) for row in self.keeper.execute(query)])
        return known[1]

    def _due(self, row: tuple[Any, ...]) -> float:
        return math.inf if row[0] is None else self._loop_time(row[0])

    def _named_due(self, row: tuple[Any, ...]) -> tuple[str, float]:
        return row[0], self._loop_time(row[1])

    def _loop_time(self, stored: str) -> float:
        return self.clock.loop_time(moment_of(stored))


class _Served(Database):
    """As if the database were a server's, with a clock of its own: that of the world."""

    def __init__(
        self, url: str, space: Space, line: Line, *, engines: tuple[AsyncEngine, AsyncEngine], steps: Steps | None
    ) -> None:
        super().__init__(url, engines=engines, steps=steps)
        self._space = space
        self._line = line

    @property
    def has_clock(self) -> bool:
        return True

    async def time(self) -> datetime:
        if self._line.is_cut():
            raise OperationalError(None, None, sqlite3.OperationalError(AWAY))
        return self._space.clock.now()


class Lent:
    """Engines for one simulated process at a time."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._target: tuple[Space, Line] | None = None
        driver = SimpleNamespace(
            **{name: getattr(sqlite3, name) for name in dir(sqlite3) if not name.startswith("_")},
        )
        driver.connect = self._connect
        driver.has_stop = True
        self._engines: tuple[AsyncEngine, AsyncEngine] = async_engines(parse_url(url), sqlite_driver=driver)
        self._compiling = Compiling(self._engines[0].dialect)
        self._pools = [engine.sync_engine.pool for engine in self._engines]

    def database(self, space: Space, line: Line, *, on_engines: bool, has_clock: bool) -> Database:
        """The space, as long as the line is not cut. The one before is closed."""
        self._target = space, line
        # A database listens to its pools for ever, and would close, once it is closed, what is given back to the next.
        for engine, pool in zip(self._engines, self._pools, strict=True):
            engine.sync_engine.pool = pool.recreate()
        steps = None if on_engines else Direct(self._connect, self._compiling)
        if has_clock:
            return _Served(self.url, space, line, engines=self._engines, steps=steps)
        return Database(self.url, engines=self._engines, steps=steps)

    def _connect(self, _path: str = "", **_options: object) -> _Connection:
        assert self._target is not None
        space, line = self._target
        if line.is_cut():
            raise sqlite3.OperationalError(AWAY)
        connection = sqlite3.connect(
            _uri(space.name),
            uri=True,
            isolation_level=None,
            factory=_Connection,
            check_same_thread=False,
            cached_statements=1_000,  # with triggers they are long to prepare
        )
        connection.space, connection.line = space, line
        tell_time(connection, space.clock.elapsed)
        return connection


@cache
def lent_engines(number: int) -> Lent:
    """The engines of the `number`-th simulated process of this operating system process. Nobody opens their URL."""
    return Lent(f"sqlite:///process-{number}.sqlite3")


@cache
def _template() -> sqlite3.Connection:
    copy = sqlite3.connect(":memory:")
    with tempfile.TemporaryDirectory(prefix="simulation-") as directory:
        path = Path(directory) / "template.sqlite3"
        upgrade(f"sqlite:///{path}")
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.backup(copy)
    watch(copy)
    return copy


def _uri(name: str) -> str:
    return f"file:{name}?mode=memory&cache=shared"
