"""SQLAlchemy's statements on a connection of `sqlite3`, without the engine, its events and its pool in between.

Theory of operation. Half of a simulated week is what SQLAlchemy does around a statement, thousands of times the same.
Here a statement is compiled once, its values are bound and its rows read by SQLAlchemy's own code, and failures are
raised as SQLAlchemy raises them; a test compares the story of a world with that on its engines. What pools make of
outages has tests of its own, in `tests/db`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from sqlalchemy import Connection, Dialect, Executable
from sqlalchemy.engine import IteratorResult
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.compiler import SQLCompiler

from db.steps import Query, Rows

T = TypeVar("T")
Values = Mapping[str, Any]  # of any type that a column has


class _Found(IteratorResult[Any]):
    """The rows that a statement returned, or how many it changed."""

    def __init__(self, metadata: SimpleResultMetaData, rows: Sequence[tuple[Any, ...]], rowcount: int) -> None:
        super().__init__(metadata, iter(rows))
        self.rowcount = rowcount


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A statement as the database takes it; the same object for each execution."""

    compiler: SQLCompiler
    metadata: SimpleResultMetaData


class Compiling:
    """Compiles each statement once."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self._compilers: dict[Any, Any] = {}  # SQLAlchemy's, by its keys
        self._known: dict[int, _Compiled] = {}

    def __call__(self, statement: Executable, several: Sequence[Values]) -> tuple[_Compiled, list[dict[str, Any]]]:
        """The statement, and the values that it takes each time."""
        made, extracted, collected, _ = statement._compile_w_cache(
            dialect=self.dialect,
            compiled_cache=self._compilers,
            column_keys=sorted(several[0]) if several else [],
            for_executemany=len(several) > 1,
        )
        compiler = cast("SQLCompiler", made)
        values = [
            dict(
                compiler.construct_params(
                    each,
                    extracted_parameters=extracted,
                    escape_names=False,
                    _group_number=number,
                    _collected_params=collected,
                )
            )
            for number, each in enumerate(several or ({},))
        ]
        known = self._known.get(id(compiler))
        if known is None:
            known = self._known[id(compiler)] = _Compiled(compiler, _metadata(compiler, self.dialect))
        return known, values


def _metadata(compiler: SQLCompiler, dialect: Dialect) -> SimpleResultMetaData:
    columns = compiler._result_columns
    read = [each.type._cached_result_processor(dialect, None) for each in columns]
    return SimpleResultMetaData([each.keyname for each in columns], _processors=read)


class Statements:
    """What shipped code asks of SQLAlchemy's `Connection` inside of `Database.transact` and `rows`."""

    def __init__(self, raw: sqlite3.Connection, compiling: Compiling) -> None:
        self.dialect = compiling.dialect
        self._raw = raw
        self._compiling = compiling

    def execute(self, statement: Executable, parameters: Values | Sequence[Values] | None = None) -> _Found:
        """Raises SQLAlchemy's exceptions."""
        several = [parameters] if isinstance(parameters, Mapping) else list(parameters or ())
        compiled, values = self._compiling(statement, several)
        compiler = compiled.compiler
        sql, bound = _bound(compiler, values)
        with raising(self.dialect):
            cursor = self._raw.cursor()
            if len(bound) > 1:
                assert not compiler._result_columns
                cursor.executemany(sql, bound)
            else:
                cursor.execute(sql, bound[0])
            return _Found(compiled.metadata, cursor.fetchall() if cursor.description else (), cursor.rowcount)


def _bound(compiler: SQLCompiler, values: list[dict[str, Any]]) -> tuple[str, list[list[Any]]]:
    """The text, and its values by position."""
    for column in (*compiler.insert_prefetch, *compiler.update_prefetch):
        for each in values:
            each.setdefault(column.key, _default(column.default if compiler.isinsert else column.onupdate))
    sql, positions = compiler.string, compiler.positiontup or []
    processors: Mapping[str, Any] = compiler._bind_processors  # functions: SQLite's types have no tuples of values
    if compiler.post_compile_params or compiler.literal_execute_params:
        expanded = compiler._process_parameters_for_postcompile(values[0])
        sql, positions = expanded.statement, list(expanded.positiontup or ())
        processors = {**processors, **expanded.processors}
    names = [(name, processors.get(name)) for name in positions]
    return sql, [[each[name] if to is None else to(each[name]) for name, to in names] for each in values]


def _default(default: Any) -> object:
    return default.arg(None) if default.is_callable else default.arg


@contextmanager
def raising(dialect: Dialect) -> Iterator[None]:
    """What the driver raises is raised as SQLAlchemy's engines would."""
    try:
        yield
    except sqlite3.Error as error:
        raise DBAPIError.instance(None, None, error, sqlite3.Error, hide_parameters=True, dialect=dialect) from error


class Direct:
    """Transactions and queries on two connections, which `connect` opens when they are needed."""

    def __init__(self, connect: Callable[[], sqlite3.Connection], compiling: Compiling) -> None:
        self._connect = connect
        self._compiling = compiling
        self._open: dict[str, Statements] = {}
        self._raw: dict[str, sqlite3.Connection] = {}

    async def transact(self, work: Callable[[Connection], T]) -> T:
        raw, statements = self._connection("writer")
        with raising(statements.dialect):
            raw.cursor().execute("BEGIN IMMEDIATE")
        try:
            result = work(cast("Connection", statements))
            with raising(statements.dialect):
                raw.commit()
        except BaseException:
            sqlite3.Connection.rollback(raw)
            raise
        return result

    async def rows(self, query: Query, values: Mapping[str, object] | None) -> Rows:
        _, statements = self._connection("reader")
        return statements.execute(query, values).all()

    async def close(self) -> None:
        for raw in self._raw.values():
            raw.close()
        self._raw.clear()
        self._open.clear()

    def _connection(self, name: str) -> tuple[sqlite3.Connection, Statements]:
        if name not in self._raw:
            with raising(self._compiling.dialect):
                self._raw[name] = self._connect()
                self._raw[name].cursor().execute("PRAGMA foreign_keys = ON")  # as the writer of `db.engines`
            self._open[name] = Statements(self._raw[name], self._compiling)
        return self._raw[name], self._open[name]
