"""Spark's filters as conditions of a query.

On PostgreSQL (`typed`) a condition holds exactly where Spark's filter does. SQLite compares whatever lies in a column,
and times as texts: there a condition holds wherever the filter does, and perhaps for a few more rows.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

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


def can_push(asked: Filter, schema: StructType) -> bool:
    """Tell whether `condition` can express the filter.

    Texts are only compared for equality: their order is the database's collation, not Spark's. Times are not compared
    for equality, as SQLite has several spellings of one.
    """
    match asked:
        case IsNull(attribute=(name,)) | IsNotNull(attribute=(name,)):
            return name in schema.names
        case Not(child=EqualTo() | In() as child):
            return can_push(child, schema)
        case EqualTo(attribute=(name,), value=value):
            return _kind(schema, name) in ("integer", "long", "string") and _is_plain(value)
        case In(attribute=(name,), value=values):
            return _kind(schema, name) in ("integer", "long", "string") and all(map(_is_plain, values))
        case GreaterThan() | GreaterThanOrEqual() | LessThan() | LessThanOrEqual():
            kind = _kind(schema, asked.attribute[0]) if len(asked.attribute) == 1 else ""
            wanted = datetime if kind == "timestamp" else int
            return kind in ("integer", "long", "timestamp") and isinstance(asked.value, wanted)
        case _:
            return False


def condition(asked: Filter, *, typed: bool) -> ColumnElement[bool]:
    """Return the filter as a condition for the database. `can_push` must hold."""
    match asked:
        case IsNull(attribute=(name,)):
            return column(name).is_(None)
        case IsNotNull(attribute=(name,)):
            return column(name).is_not(None)
        case Not(child=EqualTo(attribute=(name,), value=value)):
            return column(name) != literal(value)
        case Not(child=In(attribute=(name,), value=values)):
            return column(name).not_in(values)
        case EqualTo(attribute=(name,), value=value):
            return column(name) == literal(value)
        case In(attribute=(name,), value=values):
            return column(name).in_(values)
        case GreaterThan() | GreaterThanOrEqual() | LessThan() | LessThanOrEqual():
            return _order(asked, asked.attribute[0], asked.value, typed=typed)
        case _:
            raise TypeError(f"{type(asked).__name__} is no filter the database is asked for")


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


def _order(asked: Filter, name: str, value: object, *, typed: bool) -> ColumnElement[bool]:
    found: ColumnElement[object] = column(name)
    if isinstance(value, datetime):
        moment = value.astimezone(UTC).replace(tzinfo=None)
        if not typed:
            return _order_of_texts(asked, found, moment.replace(microsecond=0))
        found, value = column(name, DateTime()), moment
    match asked:
        case GreaterThan():
            return found > literal(value)
        case GreaterThanOrEqual():
            return found >= literal(value)
        case LessThan():
            return found < literal(value)
        case _:
            return found <= literal(value)


def _order_of_texts(asked: Filter, found: ColumnElement[object], second: datetime) -> ColumnElement[bool]:
    if isinstance(asked, GreaterThan | GreaterThanOrEqual):
        return found >= literal(_text(second))
    return found < literal(_text(second + _SECOND))


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


def _is_plain(value: object) -> bool:
    """Tell whether the value is fit for a query: PostgreSQL refuses a text with a NUL."""
    return isinstance(value, int) or (isinstance(value, str) and "\0" not in value)
