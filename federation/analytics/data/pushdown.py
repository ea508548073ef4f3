"""Spark's filters as conditions of a query.

On PostgreSQL (`typed`) a condition holds exactly where Spark's filter does. SQLite compares whatever lies in a column,
and times as texts: there a condition holds wherever the filter does, and perhaps for a few more rows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
)
from pyspark.sql.types import StructType
from sqlalchemy import ColumnElement, DateTime, column, literal

Bound: TypeAlias = int | str | datetime

_SECOND: Final = timedelta(seconds=1)
_ORDERS: Final[Mapping[type[Filter], Callable[[Any, Any], ColumnElement[bool]]]] = {  # as `operator` has them
    GreaterThan: operator.gt,
    GreaterThanOrEqual: operator.ge,
    LessThan: operator.lt,
    LessThanOrEqual: operator.le,
}


def condition(asked: Filter, schema: StructType, *, typed: bool) -> ColumnElement[bool] | None:
    """Return the filter as a condition for the database, or None if it cannot be asked to apply it.

    Texts are only compared for equality: their order is the database's collation, not Spark's. Times are not compared
    for equality, as SQLite has several spellings of one.
    """
    match asked:
        case IsNull(attribute=(name,)) if name in schema.names:
            return column(name).is_(None)
        case IsNotNull(attribute=(name,)) if name in schema.names:
            return column(name).is_not(None)
        case Not(child=EqualTo() | In() as child):
            found = condition(child, schema, typed=typed)
            return None if found is None else ~found
        case EqualTo(attribute=(name,), value=value) if _is_comparable(schema, name, value):
            return column(name) == literal(value)
        case In(attribute=(name,), value=values) if _is_comparable(schema, name, *values):
            return column(name).in_(values)
        case GreaterThan() | GreaterThanOrEqual() | LessThan() | LessThanOrEqual() if len(asked.attribute) == 1:
            return _order(asked, schema, asked.attribute[0], asked.value, typed=typed)
        case _:
            return None


def between(name: str, low: Bound | None, high: Bound | None, *, typed: bool) -> list[ColumnElement[bool]]:
    """Return conditions for the column to be at least `low` and below `high`, if given.

    Times are in UTC, and on SQLite in whole seconds.
    """
    bounds = []
    if low is not None:
        bounds.append(_compared(name, low, typed=typed) >= _bound(low, typed=typed))
    if high is not None:
        bounds.append(_compared(name, high, typed=typed) < _bound(high, typed=typed))
    return bounds


def _order(asked: Filter, schema: StructType, name: str, value: object, *, typed: bool) -> ColumnElement[bool] | None:
    kind = _kind(schema, name)
    if kind == "timestamp" and isinstance(value, datetime):
        moment = value.astimezone(UTC).replace(tzinfo=None)
        if typed:
            return _ORDERS[type(asked)](column(name, DateTime()), literal(moment))
        if isinstance(asked, GreaterThan | GreaterThanOrEqual):
            return column(name) >= literal(_text(moment))
        return column(name) < literal(_text(moment + _SECOND))
    if kind in ("integer", "long") and isinstance(value, int):
        return _ORDERS[type(asked)](column(name), literal(value))
    return None


def _compared(name: str, bound: Bound, *, typed: bool) -> ColumnElement[object]:
    return column(name, DateTime()) if typed and isinstance(bound, datetime) else column(name)


def _bound(value: Bound, *, typed: bool) -> ColumnElement[object]:
    if isinstance(value, datetime) and not typed:
        return literal(_text(value))
    return literal(value)


def _text(moment: datetime) -> str:
    """Return the shortest text of the moment: it is a prefix of all its spellings, and sorts after none of them."""
    return moment.replace(microsecond=0).isoformat(sep=" ")


def _kind(schema: StructType, name: str) -> str:
    return schema[name].dataType.typeName() if name in schema.names else ""


def _is_comparable(schema: StructType, name: str, *values: object) -> bool:
    """Tell whether the values are fit for a query of that column: PostgreSQL refuses a text with a NUL."""
    return _kind(schema, name) in ("integer", "long", "string") and all(
        isinstance(value, int) or (isinstance(value, str) and "\0" not in value) for value in values
    )
