"""Our own statements, prepared on a PostgreSQL connection and carried out by libpq alone.

Theory of operation. What psycopg does in Python for a statement takes longer than libpq takes for it, and most of that
is about types that our statements do not use. So a statement that has run often enough is prepared once more here, and
from then on goes from values to libpq and back without psycopg. Values go as text, which the server reads as whatever
type its statement wants, bytes as they are; rows come in binary. A statement with columns of another type than those of
`_LOADERS`, or of which the server cannot tell the types of the parameters, is left to psycopg for good, as are all of a
connection that is not to prepare any. The cache belongs to one connection, of which one thread at a time makes use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, TypeAlias

import psycopg
from psycopg import generators, pq
from psycopg.errors import error_from_result

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
_SPECIAL: Final = re.compile(r'(["\\])')


def _number(data: bytes) -> int:
    return int.from_bytes(data, "big", signed=True)


_LOADERS: Final[Mapping[int, Callable[[bytes], object]]] = {
    16: lambda data: data == b"\x01",  # boolean
    17: bytes,
    20: _number,
    21: _number,
    23: _number,
    25: bytes.decode,
    2278: bytes.decode,  # void
}
"""How to read a column in binary, by the number of its type."""


@dataclass(frozen=True, slots=True)
class _Statement:
    name: bytes
    parameters: tuple[str, ...]
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
        if any(kind not in _LOADERS for kind in kinds):
            return None
        columns = tuple([(described.fname(column) or b"").decode() for column in range(described.nfields)])
        return _Statement(name, parameters, columns, tuple([_LOADERS[kind] for kind in kinds]))


def _message(statement: _Statement, values: Mapping[str, object]) -> tuple[bytes, list[Any], list[int], int]:
    sent = [_encoded(values[name]) for name in statement.parameters]
    formats = [_BINARY if isinstance(values[name], bytes) else 0 for name in statement.parameters]
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


def _encoded(value: object) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    whole = "{" + ",".join([_element(element) for element in value]) + "}" if isinstance(value, list) else _text(value)
    if "\0" in whole:  # libpq would take what is before it for the whole
        raise psycopg.DataError("PostgreSQL has no text with NUL")
    return whole.encode()


def _element(value: object) -> str:
    """Return the value as an element of an array's text."""
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return rf'"\\x{value.hex()}"'
    if isinstance(value, str):
        return f'"{_SPECIAL.sub(_ESCAPED, value)}"'
    return _text(value)


_ESCAPED: Final = r"\\\1"


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "t" if value else "f"
    assert isinstance(value, str | int), type(value).__name__
    return str(value)
