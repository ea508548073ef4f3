"""The inputs of a run, from exports; each file is checked before Spark reads it."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow
import pyarrow.parquet
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from federation.analytics import frames
from federation.analytics.data.export import ATTEMPTS, EARLIER_SERVERS, FOOTERS_AT_ONCE, STORED_UNDATED
from federation.analytics.data.results import UNDATED, readable
from federation.analytics.data.snapshots import Snapshot
from federation.analytics.errors import DamagedExport, DirectoryUnusable
from federation.analytics.frames import Inputs, Window

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from datetime import date

    from pyspark.sql import DataFrame, SparkSession

    from federation.analytics.data.snapshots import Place

_WHAT_MAKES_THEM: Final = "`federation analytics export` and scripts/generate_attempts.py make them"
_IDS: Final = StructType([frames.ATTEMPTS["id"]])


def read_exports(spark: SparkSession, exports: Place, window: Window) -> Inputs:
    """Read the attempts of the days of `window`, those without a day, and the other tables whole.

    Missing inputs are empty, as long as there are any: an empty database exports no attempts.

    Raises:
        DirectoryUnusable: there are no exports.
        DamagedExport: a file is cut short or does not fit the schema; the message names it.
    """
    require_exports(exports)
    undated = STORED_UNDATED if isinstance(exports, Snapshot) else UNDATED
    days = [f"{ATTEMPTS}/{name}" for name in (*(f"day={day.isoformat()}" for day in window.days), undated)]

    def read(schema: StructType, *names: str) -> DataFrame:
        if isinstance(exports, Snapshot):
            return exports.read(spark, schema, *names)
        return _read(spark, schema, *(exports / name for name in names))

    def read_if_there(name: str, schema: StructType) -> DataFrame | None:
        return read(schema, name) if _is_there(exports, name) else None

    attempts = read(frames.ATTEMPTS, *days)
    return Inputs(
        attempts=attempts,
        attempt_ids=read(_IDS, *days) if isinstance(exports, Snapshot) else attempts.select("id"),
        servers=read(frames.SERVERS, "servers"),
        blacklist=read(frames.BLACKLIST, "blacklist"),
        health_events=read(frames.HEALTH_EVENTS, "health_events"),
        earlier_servers=read_if_there(EARLIER_SERVERS, frames.SERVERS),
        links=read_if_there("links", frames.LINKS),
        deliveries=read_if_there("deliveries", frames.DELIVERIES),
        losses=read_if_there("losses", frames.LOSSES),
        accepted_keys=read_if_there("accepted_keys", frames.ACCEPTED_KEYS),
    )


def attempts_size(exports: Place, days: Iterable[date]) -> int:
    """Return how many bytes the exported attempts of these days are."""
    names = [f"{ATTEMPTS}/day={day.isoformat()}" for day in days]
    if isinstance(exports, Snapshot):
        return sum(map(exports.size, names))
    return sum(file.stat().st_size for name in names for file in (exports / name).glob("*.parquet"))


def _is_there(exports: Place, name: str) -> bool:
    return exports.has(name) if isinstance(exports, Snapshot) else (exports / name).is_dir()


def require_exports(exports: Place) -> None:
    """Check that there are exports.

    Raises:
        DirectoryUnusable: there are none.
    """
    days = exports.partitions(ATTEMPTS) if isinstance(exports, Snapshot) else (exports / ATTEMPTS).is_dir()
    if not _is_there(exports, "servers") and not days:
        raise DirectoryUnusable(f"there are no exports in {exports}: {_WHAT_MAKES_THEM}")


def _read(spark: SparkSession, schema: StructType, *directories: Path) -> DataFrame:
    files = [file for directory in directories for file in _files(directory)]
    if not files:
        return frames.no_rows(spark, schema)
    expected = to_arrow_schema(schema)
    with ThreadPoolExecutor(FOOTERS_AT_ONCE) as pool:
        list(pool.map(functools.partial(_check, expected=expected), files))
    return spark.read.schema(schema).parquet(*(readable(file) for file in files))


def _files(directory: Path) -> Iterator[Path]:
    """Return the files that Spark would read. It skips the names of a write under way, `_temporary` and `.part-…`."""
    if (directory / "_temporary").exists():
        raise DamagedExport(
            f"{directory / '_temporary'} was left by a run that did not end; remove {directory} and export it again"
        )
    return (file for file in sorted(directory.glob("*.parquet")) if not file.name.startswith((".", "_")))


def _check(file: Path, expected: pyarrow.Schema) -> None:
    try:
        found = pyarrow.parquet.read_schema(file)
    except pyarrow.ArrowException:
        raise DamagedExport(
            f"{file} is no complete Parquet file (a killed run may have left it); remove it and export its day again"
        ) from None
    except OSError as error:
        raise DamagedExport(f"{file} cannot be read: {error.strerror or error}") from None
    for field in expected:
        if field.name not in found.names:
            raise DamagedExport(f"{file} has no column {field.name!r}; it is not an export of these tables")
        if not _fits(found.field(field.name).type, field.type):
            raise DamagedExport(f"{file}: column {field.name!r} is {found.field(field.name).type}, not {field.type}")


def _fits(found: pyarrow.DataType, expected: pyarrow.DataType) -> bool:
    """Tell whether Spark can read the one type as the other."""
    kinds = pyarrow.types
    if kinds.is_signed_integer(expected):
        return bool(kinds.is_signed_integer(found) and found.bit_width <= expected.bit_width)
    if kinds.is_string(expected):
        return bool(kinds.is_string(found) or kinds.is_large_string(found))
    if kinds.is_timestamp(expected):
        return bool(kinds.is_timestamp(found) and found.unit in ("ms", "us"))
    return bool(found == expected)
