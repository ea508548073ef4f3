"""Our own statements on the driver's connection to a PostgreSQL database.

Theory of operation. What psycopg does in Python for a statement takes longer than libpq takes for it, and most of that
is about types that our statements do not use. So a statement that has run often enough is prepared once more here, and
from then on goes from values to libpq and back without psycopg. Values go as text, which the server reads as whatever
type its statement wants. Bytes go as they are, and so do arrays of bytes or texts. Rows come in binary. A statement is
left to psycopg for good if it has columns of another type than those of `LOADERS`, or parameters whose types the server
cannot tell; so are all of a connection that is not to prepare any. The cache belongs to one connection, of which one
thread at a time makes use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import TracebackType
from typing import Any, Final, TypeAlias

import psycopg
from psycopg import generators, pq
from psycopg.errors import FeatureNotSupported, error_from_result
from sqlalchemy import Connection, TextClause
from sqlalchemy.exc import DBAPIError

from workers.storage.sql.direct import Answer, Direct, Executor, Values
from workers.storage.sql.postgres.driver.silence import OwnConnection
from workers.storage.sql.postgres.driver.values import LOADERS, encoded

Rows: TypeAlias = tuple[tuple[str, ...], list[tuple[object, ...]], int]
"""Columns, rows, and how many rows there are or were changed."""

_OFTEN: Final = 5
"""After so many times a statement is prepared, as by psycopg."""
_MOST: Final = 200
"""How many statements one connection holds prepared at most."""
_BINARY: Final = 1
_GONE: Final = frozenset({"26000", "0A000"})
"""Somebody has dropped the prepared statement, or changed what it returns: it can be carried out anew."""

PARAMETER: Final = re.compile(r"(?<![:\w]):(\w+)(?!:)")  # as SQLAlchemy has it


@dataclass(frozen=True, slots=True)
class _Statement:
    name: bytes
    parameters: tuple[tuple[str, int], ...]  # the name and the type of each
    columns: tuple[str, ...]
    loaders: tuple[Callable[[bytes], object], ...]


@dataclass(slots=True)
class Prepared:
    """The statements that are prepared on one connection."""

    driver: psycopg.Connection[tuple[object, ...]]
    _statements: dict[str, _Statement | None] = field(default_factory=dict)  # None: left to psycopg
    _seen: dict[str, int] = field(default_factory=dict)
    _arrived: list[pq.abc.PGresult] = field(default_factory=list)

    def is_prepared(self, sql: str) -> bool:
        """Tell whether the statement can be sent."""
        return self._statements.get(sql) is not None

    def execute(self, sql: str, values: Mapping[str, object]) -> Rows | None:
        """Carry the statement out in a transaction of its own; None, with nothing done, if it is left to psycopg.

        Raises:
            psycopg.Error: the database refused, or the connection broke.
        """
        if sql not in self._statements and not self._is_to_be_prepared(sql):
            return None
        statement = self._statements[sql]
        if statement is None:
            return None
        self.driver.pgconn.send_query_prepared(*_message(statement, values))
        return self.answer(sql, self._wait())

    def send(self, sql: str, values: Mapping[str, object]) -> bool:
        """Send a statement that is prepared without waiting for the server; tell whether all of it is sent.

        Raises:
            psycopg.Error: a value cannot be sent, or the connection broke.
        """
        statement = self._statements[sql]
        assert statement is not None
        self._arrived = []
        self.driver.pgconn.send_query_prepared(*_message(statement, values))
        return self.flush()

    def flush(self) -> bool:
        """Send more of the last message; tell whether all of it is sent."""
        return not self.driver.pgconn.flush()

    def receive(self) -> pq.abc.PGresult | None:
        """Read what has arrived, without waiting for more; None until the answer is whole.

        Raises:
            psycopg.Error: the connection broke.
        """
        connection = self.driver.pgconn
        connection.consume_input()
        while not connection.is_busy():
            result = connection.get_result()
            if result is None:
                whole, self._arrived = self._arrived, []
                return whole[-1]
            self._arrived.append(result)
        return None

    def answer(self, sql: str, result: pq.abc.PGresult) -> Rows | None:
        """Read the answer; None, if the statement could not be carried out because it is prepared no longer.

        Raises:
            psycopg.Error: the database refused.
        """
        statement = self._statements[sql]
        assert statement is not None
        if result.status == pq.ExecStatus.TUPLES_OK:
            return statement.columns, _rows(result, statement.loaders), result.ntuples
        if result.status == pq.ExecStatus.COMMAND_OK:
            return (), [], result.command_tuples or 0
        error = error_from_result(result)
        if error.sqlstate in _GONE:
            self._statements[sql] = None
            return None
        raise error

    def _wait(self) -> pq.abc.PGresult:
        """Wait for the answer as psycopg does, which libpq itself would do for ever."""
        results: list[pq.abc.PGresult] = self.driver.wait(generators.execute(self.driver.pgconn))
        return results[-1]

    def _is_to_be_prepared(self, sql: str) -> bool:
        """Prepare the statement if it has run often; tell whether that was tried."""
        if self.driver.prepare_threshold is None or len(self._statements) >= _MOST:
            return False
        times = self._seen[sql] = self._seen.get(sql, 0) + 1
        if times <= _OFTEN:
            return False
        del self._seen[sql]
        self._statements[sql] = self._prepare(sql)
        return True

    def _prepare(self, sql: str) -> _Statement | None:
        name = b"workers_%d" % len(self._statements)
        numbered, parameters = _numbered(sql)
        connection = self.driver.pgconn
        connection.send_prepare(name, numbered)
        if self._wait().status != pq.ExecStatus.COMMAND_OK:
            return None
        connection.send_describe_prepared(name)
        described = self._wait()
        if described.status != pq.ExecStatus.COMMAND_OK:
            return None
        kinds = [described.ftype(column) for column in range(described.nfields)]
        if any(kind not in LOADERS for kind in kinds):
            return None
        columns = tuple([(described.fname(column) or b"").decode() for column in range(described.nfields)])
        typed = tuple([(each, described.param_type(place)) for place, each in enumerate(parameters)])
        return _Statement(name, typed, columns, tuple([LOADERS[kind] for kind in kinds]))


def _message(statement: _Statement, values: Mapping[str, object]) -> tuple[bytes, list[Any], list[int], int]:
    sent: list[bytes | None] = []
    formats = []
    for name, kind in statement.parameters:
        data, in_binary = encoded(values[name], kind)
        sent.append(data)
        formats.append(_BINARY if in_binary else 0)
    return statement.name, sent, formats, _BINARY  # the type of the values leaves out None, for NULL


def _rows(result: pq.abc.PGresult, loaders: Sequence[Callable[[bytes], object]]) -> list[tuple[object, ...]]:
    value, columns = result.get_value, list(enumerate(loaders))
    return [
        tuple([None if (data := value(row, column)) is None else load(data) for column, load in columns])
        for row in range(result.ntuples)
    ]


@lru_cache(1_000)
def _numbered(sql: str) -> tuple[bytes, tuple[str, ...]]:
    """Return the statement with `$1` for a parameter, and the names of the parameters in the order of their numbers."""
    names = tuple(dict.fromkeys(PARAMETER.findall(sql)))
    return PARAMETER.sub(lambda found: f"${names.index(found[1]) + 1}", sql).encode(), names


_ARRAY: Final = re.compile(r"CAST\(:(\w+) AS (\w+)\[\]\)")
_PREPARED: Final = "workers_prepared"
_PSYCOPG: Final = frozenset({"psycopg", "psycopg_async"})
"""What SQLAlchemy calls the driver."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A statement that is under way; it `is_whole` unless some of it could not be sent at once."""

    sql: str
    descriptor: int
    is_whole: bool


class PostgresDirect(Direct):
    """See `Direct`; a connection that broke is given up, and one that has prepared what was migrated since.

    With `alone`, each statement is a transaction of its own; otherwise all of them belong to the one that SQLAlchemy
    has begun.
    """

    def __init__(self, connection: Connection, *, alone: bool) -> None:
        super().__init__(connection)
        self._driver = driver_of(connection)
        if self._driver.autocommit is not alone:
            with self._giving_up("SET autocommit"):
                self._driver.autocommit = alone
        self._prepared = _prepared(connection, self._driver) if alone else None

    def _once(self, sql: str, values: Values) -> Answer:
        sql, values = _of_single_values(sql, values)
        with self._giving_up(sql):
            found = self._prepared.execute(sql, values) if self._prepared is not None else None
            if found is not None:
                return Answer(*found)
            return _answer(self._driver.execute(_as_psycopg_has_it(sql).encode(), values))

    def send(self, statement: TextClause, values: Values) -> Sent | None:
        """Send a statement without waiting for the server; None, with nothing done, if that would wait.

        Raises:
            DBAPIError: a value cannot be sent, or the connection broke.
        """
        sql, values = _of_single_values(statement.text, values)
        if self._prepared is None or not self._prepared.is_prepared(sql):
            return None
        with self._giving_up(sql):
            return Sent(sql, self._driver.pgconn.socket, is_whole=self._prepared.send(sql, values))

    def send_more(self, sent: Sent) -> bool:
        """Send more of what the server was too slow to take; tell whether that is all of it."""
        assert self._prepared is not None
        with self._giving_up(sent.sql):
            return self._prepared.flush()

    def receive(self, sent: Sent) -> Answer | Sent | None:
        """Read what has arrived: the answer, None if it is not whole, or what was `sent` if that was not carried out.

        Raises:
            DBAPIError: the database refused, or the connection broke.
        """
        assert self._prepared is not None
        with self._giving_up(sent.sql):
            result = self._prepared.receive()
            if result is None:
                return None
            found = self._prepared.answer(sent.sql, result)
        return sent if found is None else Answer(*found)

    @property
    def silence(self) -> float | None:
        """How many seconds the server may be silent while it owes an answer."""
        return None if self._driver.silence is None else self._driver.silence.total_seconds()

    def hang_up(self, sent: Sent, since: float) -> DBAPIError:
        """Give the connection up, as nothing was heard since then, and return the error that says so."""
        error = self._driver.hang_up(since)
        give_up(self.plain)
        return DBAPIError(sent.sql, None, error, hide_parameters=True)

    def _for_each(self, sql: str, values: Sequence[Values]) -> Answer:
        with self._giving_up(sql):
            cursor = self._driver.cursor()
            cursor.executemany(_as_psycopg_has_it(sql).encode(), values)
            return Answer((), (), cursor.rowcount)

    def _giving_up(self, sql: str) -> _GivingUp:
        return _GivingUp(self.plain, self._driver, sql)


@dataclass(frozen=True, slots=True)
class _GivingUp:
    """Raises what psycopg raises as SQLAlchemy would; made twice for each statement, and so no generator's context."""

    connection: Connection
    driver: OwnConnection
    sql: str

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, psycopg.Error):
            return
        # The latter: "cached plan must not change result type".
        if self.driver.closed or isinstance(error, FeatureNotSupported):
            give_up(self.connection)
        raise DBAPIError(self.sql, None, error, hide_parameters=True) from error


class PostgresJoined(Direct):
    """See `Direct`; on a caller's connection by psycopg, whatever the settings of its session are."""

    @classmethod
    def of(cls, connection: Connection) -> Executor:
        """Return what carries out statements on the connection; other drivers than psycopg know types by the server."""
        return cls(connection) if connection.dialect.driver in _PSYCOPG else connection

    def _once(self, sql: str, values: Values) -> Answer:
        sql, values = _without_arrays_of_null(*_of_single_values(sql, values))
        found = self.plain.exec_driver_sql(_as_psycopg_has_it(sql), dict(values))
        if not found.returns_rows:
            return Answer((), (), found.rowcount)
        return Answer(tuple(found.keys()), [tuple(row) for row in found], found.rowcount)

    def _for_each(self, sql: str, values: Sequence[Values]) -> Answer:
        found = self.plain.exec_driver_sql(_as_psycopg_has_it(sql), [dict(each) for each in values])
        return Answer((), (), found.rowcount)


def driver_of(connection: Connection) -> OwnConnection:
    """Return the driver's connection in one of ours."""
    driver: object = connection.connection.dbapi_connection
    assert isinstance(driver, OwnConnection)
    return driver


def give_up(connection: Connection) -> None:
    """Close a connection whose state nobody knows."""
    if not connection.invalidated:
        driver = driver_of(connection)
        connection.invalidate()
        driver.close()  # it belongs to no pool that would do it


def _prepared(connection: Connection, driver: psycopg.Connection[tuple[object, ...]]) -> Prepared:
    """Return the statements that are prepared on this connection; they are forgotten when it is closed."""
    known = connection.info
    found: object = known.get(_PREPARED)
    if not isinstance(found, Prepared) or found.driver is not driver:
        found = known[_PREPARED] = Prepared(driver)
    return found


def _answer(cursor: psycopg.Cursor[tuple[object, ...]]) -> Answer:
    if cursor.description is None:
        return Answer((), (), cursor.rowcount)
    return Answer(tuple([column.name for column in cursor.description]), cursor.fetchall(), cursor.rowcount)


def _of_single_values(sql: str, values: Values) -> tuple[str, Values]:
    """Return the statement and its values without arrays, if each has one element.

    An array takes psycopg and the server several times as long as the value in it, and most steps are about one job.
    """
    found: dict[str, object] = {}
    for name in _arrays(sql):
        elements = values[name]
        if not isinstance(elements, list) or len(elements) != 1:
            return sql, values
        found[name] = elements[0]
    return (_without_arrays(sql), {**values, **found}) if found else (sql, values)


@lru_cache(1_000)
def _arrays(sql: str) -> tuple[str, ...]:
    return tuple(name for name, _ in _ARRAY.findall(sql))


@lru_cache(1_000)
def _without_arrays(sql: str) -> str:
    return _ARRAY.sub(r"ARRAY[CAST(:\1 AS \2)]", sql)


def _without_arrays_of_null(sql: str, values: Values) -> tuple[str, Values]:
    """Return the statement and its values with the lengths of arrays that have NULL alone.

    Psycopg does not send these in binary, and with `array_nulls = off` their text would mean something else.
    """
    arrays = [(name, values[name]) for name in _arrays(sql)]
    lengths = {name: len(found) for name, found in arrays if isinstance(found, list) and _has_null_alone(found)}
    return (_with_nulls(sql, frozenset(lengths)), {**values, **lengths}) if lengths else (sql, values)


def _has_null_alone(elements: Sequence[object]) -> bool:
    return bool(elements) and all(element is None for element in elements)


@lru_cache(1_000)
def _with_nulls(sql: str, names: frozenset[str]) -> str:
    def fill(found: re.Match[str]) -> str:
        name, kind = found.groups()
        filled = f"array_fill(CAST(NULL AS {kind}), ARRAY[CAST(:{name} AS integer)])"
        return filled if name in names else found[0]

    return _ARRAY.sub(fill, sql)


@lru_cache(1_000)
def _as_psycopg_has_it(sql: str) -> str:
    """Return the statement with psycopg's parameters.

    Arrays go in binary: with `standard_conforming_strings = off` the text of one would have other bytes in it.
    """
    arrays = frozenset(_arrays(sql))
    return PARAMETER.sub(lambda found: f"%({found[1]}){'b' if found[1] in arrays else 's'}", sql.replace("%", "%%"))
