"""Our own statements on the driver's connection to a PostgreSQL database."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import psycopg
from psycopg.errors import FeatureNotSupported
from sqlalchemy import Connection, TextClause
from sqlalchemy.exc import DBAPIError

from workers.storage.sql.direct import Answer, Direct, Executor, Values
from workers.storage.sql.postgres.prepared import PARAMETER, Prepared
from workers.storage.sql.postgres.silence import OwnConnection

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

    @contextmanager
    def _giving_up(self, sql: str) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            # The latter: "cached plan must not change result type".
            if self._driver.closed or isinstance(error, FeatureNotSupported):
                give_up(self.plain)
            raise DBAPIError(sql, None, error, hide_parameters=True) from error


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
