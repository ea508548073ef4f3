"""Rows of a database as Arrow record batches.

SQLite keeps any kind of value in any column. A value that is not of its column's kind becomes null, and the checks of
the transforms set its row aside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final

import pyarrow
from pyspark.sql.types import StructField

_UNZONED: Final = pyarrow.timestamp("us")
_ZONED: Final = pyarrow.timestamp("us", tz="UTC")
_INTEGERS: Final = {"integer": pyarrow.int32(), "long": pyarrow.int64()}


def to_batch(rows: Sequence[Sequence[object]], fields: Sequence[StructField]) -> pyarrow.RecordBatch:
    """Convert `rows`, which are not empty, to a batch with one column per field."""
    by_column = zip(zip(*rows, strict=True), fields, strict=True)
    columns = [_column(values, field.dataType.typeName()) for values, field in by_column]
    return pyarrow.RecordBatch.from_arrays(columns, names=[field.name for field in fields])


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
    try:
        # PostgreSQL's driver returns datetimes, SQLite's returns texts.
        if any(isinstance(value, str) for value in values):
            return pyarrow.array(values, pyarrow.string()).cast(_UNZONED).cast(_ZONED)
        return pyarrow.array(values, _UNZONED).cast(_ZONED)
    except (pyarrow.ArrowException, TypeError):
        return pyarrow.array([_time(value) for value in values], _ZONED)


def _time(value: object) -> datetime | None:
    try:
        moment = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
        return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return None


def _boolean(value: object) -> bool | None:
    return bool(value) if value in (True, False, 0, 1) else None
