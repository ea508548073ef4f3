"""Our own statements on the driver's own connection, without SQLAlchemy's way there.

Theory of operation. For a short statement SQLAlchemy takes longer than the driver does. So the steps that run on our
own connections go past it. They are written for an SQLAlchemy connection all the same, because a caller's transaction
is one, and `Direct` answers them as that would. SQLAlchemy still opens connections, and begins and ends transactions.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, TypeAlias

from sqlalchemy import Connection, Dialect, TextClause
from sqlalchemy.engine.result import IteratorResult, SimpleResultMetaData

Values: TypeAlias = Mapping[str, object]

_LIST: Final = re.compile(r"\bIN :(\w+)")  # as `rows.expanding` has it


class Answer(IteratorResult[Any]):  # rows of any columns, as SQLAlchemy's own for a text
    """The rows of a statement, and how many it has changed."""

    def __init__(self, columns: tuple[str, ...], rows: Sequence[tuple[object, ...]], rowcount: int) -> None:
        super().__init__(_described(columns), iter(rows))
        self.rowcount = rowcount
        self._all = rows

    def scalar_one(self) -> Any:  # of any type, as SQLAlchemy's
        """Return the value of the only row, as most statements have one, without SQLAlchemy's way to it."""
        return self._all[0][0] if len(self._all) == 1 else super().scalar_one()


class Direct(ABC):
    """A connection that carries out `text()` statements at once, and has read every row when it answers."""

    def __init__(self, connection: Connection) -> None:
        self.plain = connection

    @property
    def dialect(self) -> Dialect:
        return self.plain.dialect

    def execute(self, statement: TextClause, values: Values | Sequence[Values] = ()) -> Answer:
        """Carry out the statement, once for each of several values.

        Raises:
            DBAPIError: the database refused; the error quotes no values.
        """
        sql = statement.text
        if isinstance(values, Mapping):
            return self._once(*_with_lists(sql, values))
        if len(values) > 1:
            return self._for_each(sql, values)
        return self._once(sql, values[0] if values else {})

    @abstractmethod
    def _once(self, sql: str, values: Values) -> Answer: ...

    @abstractmethod
    def _for_each(self, sql: str, values: Sequence[Values]) -> Answer: ...


Executor: TypeAlias = Connection | Direct
"""What carries out the statements of a step."""


def plain(executor: Executor) -> Connection:
    """Return the SQLAlchemy connection."""
    return executor.plain if isinstance(executor, Direct) else executor


@lru_cache(1_000)
def _described(columns: tuple[str, ...]) -> SimpleResultMetaData:
    return SimpleResultMetaData(columns)


def _with_lists(sql: str, values: Values) -> tuple[str, Values]:
    """Return the statement and its values with a parameter for each element of a list.

    Their number is rounded up to a power of two, by repeating one, so that few statements have to be prepared.
    """
    names = _lists(sql)
    if not names:
        return sql, values
    bound = dict(values)
    counts = []
    for name in names:
        elements = bound.pop(name)
        assert isinstance(elements, list)
        counts.append(count := 1 << (len(elements) - 1).bit_length() if elements else 0)
        padded = elements + elements[:1] * (count - len(elements))
        bound.update((f"{name}_{place}", element) for place, element in enumerate(padded))
    return _expanded(sql, tuple(counts)), bound


@lru_cache(1_000)
def _lists(sql: str) -> tuple[str, ...]:
    return tuple(_LIST.findall(sql))


@lru_cache(1_000)
def _expanded(sql: str, counts: tuple[int, ...]) -> str:
    left = iter(counts)

    def expand(match: re.Match[str]) -> str:
        elements = [f":{match[1]}_{place}" for place in range(next(left))]
        return f"IN ({', '.join(elements) or 'NULL'})"

    return _LIST.sub(expand, sql)
