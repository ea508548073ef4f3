"""Rows of a database as Arrow record batches.

SQLite keeps any kind of value in any column. A value that is not of its column's kind becomes null and is told in the
column `unreadable`, for which the checks of the transforms set its row aside.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final

import pyarrow
from pyspark.sql.types import StructField

UNREADABLE: Final = "unreadable"
MOST_CHARACTERS: Final = 200
"""How much is told of a value that cannot be read."""

_UNZONED: Final = pyarrow.timestamp("us")
_ZONED: Final = pyarrow.timestamp("us", tz="UTC")
_INTEGERS: Final = {"integer": pyarrow.int32(), "long": pyarrow.int64()}


def to_batch(rows: Sequence[Sequence[object]], fields: Sequence[StructField]) -> pyarrow.RecordBatch:
    """Convert `rows`, which are not empty, to a batch with one column per field.

    The rows have a value for each field but `UNREADABLE`, which may be the last.
    """
    names = [field.name for field in fields]
    by_column = list(zip(*rows, strict=True))
    read = zip(by_column, fields[: len(by_column)], strict=True)
    columns = [_column(values, field.dataType.typeName()) for values, field in read]
    if names[-1:] == [UNREADABLE]:
        columns.append(_unreadable(by_column, columns, names))
    return pyarrow.RecordBatch.from_arrays(columns, names=names)


def _unreadable(
    raw: Sequence[Sequence[object]], columns: Sequence[pyarrow.Array], names: Sequence[str]
) -> pyarrow.Array:
    """Return, for each row, what became null though it was not, as JSON by column; null for nothing."""
    found: dict[int, dict[str, str]] = {}
    for values, column, name in zip(raw, columns, names, strict=False):
        if column.null_count > values.count(None):
            for at in range(len(values)):
                if values[at] is not None and not column[at].is_valid:
                    found.setdefault(at, {})[name] = str(values[at])[:MOST_CHARACTERS]
    told = [json.dumps(found[at]) if at in found else None for at in range(len(columns[0]))]
    return pyarrow.array(told, pyarrow.string())


def _column(values: Sequence[object], kind: str) -> pyarrow.Array:
    match kind:
        case "timestamp":
            return _times(values)
        case "boolean":
            return pyarrow.array([_boolean(value) for value in values], pyarrow.bool_())
        case "string":
            return _or_null(values, pyarrow.string(), lambda value: isinstance(value, str))
        case _:
            bits = _INTEGERS[kind].bit_width - 1
            return _or_null(
                values, _INTEGERS[kind], lambda value: isinstance(value, int) and -(2**bits) <= value < 2**bits
            )


def _or_null(values: Sequence[object], kind: pyarrow.DataType, fits: Callable[[object], bool]) -> pyarrow.Array:
    try:
        return pyarrow.array(values, kind)
    except (pyarrow.ArrowException, TypeError, OverflowError, UnicodeError):
        return pyarrow.array([value if fits(value) else None for value in values], kind)


def _times(values: Sequence[object]) -> pyarrow.Array:
    """Convert times to UTC, which times without a zone are in already. Texts are read as ISO 8601."""
    # PostgreSQL's driver returns datetimes, SQLite's returns texts. Arrow would take a number for microseconds.
    kinds = set(map(type, values)) - {type(None)}
    with suppress(pyarrow.ArrowException, TypeError):
        if kinds == {str}:
            return pyarrow.array(values, pyarrow.string()).cast(_UNZONED).cast(_ZONED)
        if kinds <= {datetime}:
            return pyarrow.array(values, _UNZONED).cast(_ZONED)
    return pyarrow.array([_time(value) for value in values], _ZONED)


def _time(value: object) -> datetime | None:
    if not isinstance(value, str | datetime):
        return None
    try:
        moment = value if isinstance(value, datetime) else datetime.fromisoformat(value)
        return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return None


def _boolean(value: object) -> bool | None:
    return bool(value) if value in (True, False, 0, 1) else None
