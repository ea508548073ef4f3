"""SQLAlchemy's statements on a connection of `sqlite3`, without the engine, its events and its pool in between.

Theory of operation. Half of a simulated week is what SQLAlchemy does around a statement, thousands of times the same.
Here a statement is compiled once, its values are bound and its rows read by SQLAlchemy's own code, and failures are
raised as SQLAlchemy raises them; a test compares the story of a world with that on its engines. What pools make of
outages has tests of its own, in `tests/db`.
"""

from __future__ import annotations

import sqlite3
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

from sqlalchemy import Connection, Dialect, Executable
from sqlalchemy.engine import IteratorResult
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.compiler import ExpandedState, SQLCompiler

from db.session import Query, Rows

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
    places: tuple[_Place, ...] | None
    """Where each value comes from; None if that, or the text, differs from one execution to the next."""
    named: tuple[tuple[str, _Place], ...] | None
    """Each value by its name in the text, for one with lists of values (`IN`)."""
    expanded: dict[tuple[int, ...], ExpandedState] = field(default_factory=dict)
    """The text and its places, by the lengths of the lists of values (`IN`) of which it has some."""


@dataclass(frozen=True, slots=True)
class _Place:
    """One value of a statement: that of `name`, or else that of the statement's own parameter at `index`."""

    name: str
    index: int
    process: Callable[[Any], Any] | None


class Compiling:
    """Compiles each statement once."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self._compilers: dict[Any, Any] = {}  # SQLAlchemy's, by its keys
        self._known: dict[int, _Compiled] = {}
        self._constant: dict[
            tuple[int, bool, tuple[str, ...]], tuple[weakref.ref[Executable], _Compiled, Any, Any]
        ] = {}

    def __call__(self, statement: Executable, several: Sequence[Values]) -> tuple[str, list[list[Any]], _Compiled]:
        """The text, the values that it takes each time, and what else is known of the statement."""
        compiled, extracted, collected = self._compiled(statement, several)
        if compiled.places is not None and len(several) < 2:
            given = several[0] if several else {}
            return compiled.compiler.string, [[_value(place, given, extracted) for place in compiled.places]], compiled
        compiler = compiled.compiler
        if compiled.named is not None and len(several) < 2:
            given = several[0] if several else {}
            values = {name: _unprocessed(place, given, extracted) for name, place in compiled.named}
            return *_bound(compiled, [values]), compiled
        constructed = [
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
        return *_bound(compiled, constructed), compiled

    def _compiled(self, statement: Executable, several: Sequence[Values]) -> tuple[_Compiled, Any, Any]:
        """By the object, where it is one of a module's: SQLAlchemy's key takes longer to look up than its execution."""
        key = id(statement), len(several) > 1, tuple(several[0]) if several else ()
        constant = self._constant.get(key)
        if constant is not None and constant[0]() is statement:
            return constant[1:]
        made, extracted, collected, _ = statement._compile_w_cache(
            dialect=self.dialect,
            compiled_cache=self._compilers,
            column_keys=sorted(several[0]) if several else [],
            for_executemany=len(several) > 1,
        )
        compiler = cast("SQLCompiler", made)
        known = self._known.get(id(compiler))
        if known is None:
            known = self._known[id(compiler)] = _Compiled(
                compiler, _metadata(compiler, self.dialect), *((None, None) if collected else _places(compiler))
            )
        forget = partial(self._forget, key)
        self._constant[key] = weakref.ref(statement, forget), known, extracted, collected
        return known, extracted, collected

    def _forget(self, key: tuple[int, bool, tuple[str, ...]], gone: object) -> None:
        constant = self._constant.get(key)
        if constant is not None and constant[0] is gone:
            del self._constant[key]


def _value(place: _Place, given: Values, extracted: Sequence[Any]) -> Any:
    value = _unprocessed(place, given, extracted)
    return value if place.process is None else place.process(value)


def _unprocessed(place: _Place, given: Values, extracted: Sequence[Any]) -> Any:
    return given[place.name] if place.name in given else extracted[place.index].effective_value


def _places(compiler: SQLCompiler) -> tuple[tuple[_Place, ...] | None, tuple[tuple[str, _Place], ...] | None]:
    """The places of what has all its values at hand, one by one; or, if it has lists of them, the names as well."""
    if compiler.literal_execute_params or compiler.insert_prefetch or compiler.update_prefetch:
        return None, None
    extracted = compiler.cache_key[1] if compiler.cache_key is not None else ()
    indexes = {parameter.key: index for index, parameter in enumerate(extracted)}
    processors: Mapping[str, Any] = compiler._bind_processors
    found = {
        name: _Place(parameter.key, indexes[parameter.key], processors.get(name))
        for parameter, name in compiler.bind_names.items()
        if parameter.key in indexes
    }
    if len(found) < len(compiler.bind_names):
        return None, None
    if compiler.post_compile_params:
        return None, tuple(found.items())
    return tuple(found[name] for name in compiler.positiontup or ()), None


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

    @property
    def connection(self) -> sqlite3.Connection:
        """The driver's own."""
        return self._raw

    def execute(self, statement: Executable, parameters: Values | Sequence[Values] | None = None) -> _Found:
        """Raises SQLAlchemy's exceptions."""
        several = [parameters] if isinstance(parameters, Mapping) else list(parameters or ())
        sql, bound, compiled = self._compiling(statement, several)
        with raising(self.dialect):
            cursor = self._raw.cursor()
            if len(bound) > 1:
                assert not compiled.metadata.keys
                cursor.executemany(sql, bound)
            else:
                cursor.execute(sql, bound[0])
            return _Found(compiled.metadata, cursor.fetchall() if cursor.description else (), cursor.rowcount)


def _bound(compiled: _Compiled, values: list[dict[str, Any]]) -> tuple[str, list[list[Any]]]:
    """The text, and its values by position."""
    compiler = compiled.compiler
    for column in (*compiler.insert_prefetch, *compiler.update_prefetch):
        for each in values:
            each.setdefault(column.key, _default(column.default if compiler.isinsert else column.onupdate))
    sql, positions = compiler.string, compiler.positiontup or []
    processors: Mapping[str, Any] = compiler._bind_processors  # functions: SQLite's types have no tuples of values
    if compiler.post_compile_params or compiler.literal_execute_params:
        expanded = _expanded(compiled, values[0])
        sql, positions = expanded.statement, list(expanded.positiontup or ())
        processors = {**processors, **expanded.processors}
    names = [(name, processors.get(name)) for name in positions]
    return sql, [[each[name] if to is None else to(each[name]) for name, to in names] for each in values]


def _expanded(compiled: _Compiled, values: dict[str, Any]) -> ExpandedState:
    """The text with a place for each value of a list; `values` has them by its names."""
    compiler = compiled.compiler
    if compiler.literal_execute_params or any(each.type._is_tuple_type for each in compiler.post_compile_params):
        return compiler._process_parameters_for_postcompile(values)
    lists = [compiler.bind_names[parameter] for parameter in compiler.post_compile_params]
    lengths = tuple(len(values[name]) for name in lists)
    known = compiled.expanded.get(lengths)
    if known is None:
        return compiled.expanded.setdefault(lengths, compiler._process_parameters_for_postcompile(values))
    for name in lists:
        values.update(zip(known.parameter_expansion[name], values[name], strict=True))
    return known


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
    """Transactions and queries on one connection, which `connect` opens when it is needed: none of them awaits."""

    def __init__(self, connect: Callable[[], sqlite3.Connection], compiling: Compiling) -> None:
        self._connect = connect
        self._compiling = compiling
        self._raw: sqlite3.Connection | None = None

    async def transact(self, work: Callable[[Connection], T]) -> T:
        raw = self._connection()
        with raising(self._compiling.dialect):
            raw.cursor().execute("BEGIN IMMEDIATE")
        try:
            result = work(cast("Connection", Statements(raw, self._compiling)))
            with raising(self._compiling.dialect):
                raw.commit()
        except BaseException:
            sqlite3.Connection.rollback(raw)
            raise
        return result

    async def rows(self, query: Query, values: Mapping[str, object] | None) -> Rows:
        return Statements(self._connection(), self._compiling).execute(query, values).all()

    async def close(self) -> None:
        if self._raw is not None:
            self._raw.close()
            self._raw = None

    def _connection(self) -> sqlite3.Connection:
        if self._raw is None:
            with raising(self._compiling.dialect):
                self._raw = self._connect()
                self._raw.cursor().execute("PRAGMA foreign_keys = ON")  # as the writer of `db.engines`
        return self._raw
