"""Where results lie on disk, and reading them back.

`OUT/<name>/<day or as_of>=YYYY-MM-DD/data.parquet`, and `OUT/quarantine/day=unknown/data.parquet`: one file per
partition, because replacing one file is the only step that POSIX makes atomic; a directory can only be emptied and
filled again. Each file is sorted, so the same results are the same rows in the same order. Driver and executors must
see OUT under the same path (a disk or a mount). In a store, partitions have the same names, and a manifest says which
files they are: see `snapshots`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as sf
from pyspark.sql.types import StructType

from federation.analytics import frames
from federation.analytics.data.directories import write_file
from federation.analytics.data.snapshots import Snapshot
from federation.analytics.data.spark_files import literal
from federation.analytics.data.stored_files import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import date
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from federation.analytics.data.snapshots import Place

DATA_FILE: Final = "data.parquet"
UNDATED: Final = "day=__HIVE_DEFAULT_PARTITION__"
"""Where Spark writes rows whose day is null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One of the outputs: its directory, its partition column, and the order of its rows within a partition."""

    name: str
    schema: StructType
    partition: str
    order: tuple[str, ...]

    def place(self, date_: date | None) -> str:
        """Return the partition of a date, or of the rows without one."""
        return f"{self.name}/{self.partition}={date_.isoformat() if date_ else UNKNOWN}"

    def file(self, out: Path, date_: date | None) -> Path:
        """Return where the rows of a date are in a directory, or those without one."""
        return out / self.place(date_) / DATA_FILE


SERVER_DAILY: Final = Result(
    name="server_daily", schema=frames.SERVER_DAILY, partition="day", order=("day", "server_url")
)
NETWORK_SUMMARY: Final = Result(name="network_summary", schema=frames.NETWORK_SUMMARY, partition="day", order=("day",))
SERVER_SCORECARD: Final = Result(
    name="server_scorecard",
    schema=frames.SERVER_SCORECARD,
    partition="as_of",
    order=("server_url", "window_days"),
)
KEY_ANOMALIES: Final = Result(
    name="key_anomalies",
    schema=frames.KEY_ANOMALIES,
    partition="as_of",
    order=("kind", "key_kind", "fingerprint", "detail", "server_urls"),
)
RELAY_CANDIDATES: Final = Result(
    name="relay_candidates", schema=frames.RELAY_CANDIDATES, partition="as_of", order=("rank", "server_url")
)
QUARANTINE: Final = Result(
    name="quarantine", schema=frames.QUARANTINE, partition="day", order=("day", "source", "reason", "row")
)

DAILY: Final = (SERVER_DAILY, NETWORK_SUMMARY, QUARANTINE)
DATED: Final = (SERVER_SCORECARD, KEY_ANOMALIES, RELAY_CANDIDATES)


def local(path: Path) -> str:
    """Return the path as Spark has to write it, even if its default file system is another one."""
    return f"file://{path.absolute()}"


def readable(path: Path) -> str:
    """Return the path as Spark has to read it: by itself it takes `p[1]` for a pattern."""
    return literal(local(path))


def is_stored(out: Place, result: Result, date_: date | None) -> bool:
    """Tell whether a run has written the result of this date, or of none."""
    return out.has(result.place(date_)) if isinstance(out, Snapshot) else result.file(out, date_).exists()


def stored_dates(out: Place, result: Result) -> list[str]:
    """Return the dates of which there are results, in order, as texts; perhaps also what is no date."""
    if isinstance(out, Snapshot):
        names = out.partitions(result.name)
    else:
        names = sorted(path.name for path in (out / result.name).glob(f"{result.partition}=????-??-??"))
    return [name.partition("=")[2] for name in names]


def write_text(text: str, name: str, out: Place) -> None:
    """Write a small file of this name, whole or not at all. In a store it is there once it is committed."""
    if isinstance(out, Snapshot):
        out.write_text(name, text)
    else:
        write_file(text, out / name)


def read_days(
    spark: SparkSession, out: Place, result: Result, days: Iterable[date], columns: Sequence[str] | None = None
) -> DataFrame:
    """Read the rows of those `days` that are stored, and nothing of the others; by default all of their columns."""
    schema = StructType([result.schema[name] for name in columns or result.schema.names])
    if isinstance(out, Snapshot):
        return out.read(spark, schema, *(result.place(day) for day in days))
    files = [readable(file) for day in days if (file := result.file(out, day)).exists()]
    if not files:
        return frames.no_rows(spark, schema)
    return _read(spark, out, result, files).select(*schema.names)


def read_undated(spark: SparkSession, out: Place, result: Result) -> DataFrame:
    """Read the rows without a day."""
    if isinstance(out, Snapshot):
        return out.read(spark, result.schema, result.place(None))
    file = result.file(out, None)
    if not file.exists():
        return frames.no_rows(spark, result.schema)
    schema = StructType([field for field in result.schema if field.name != result.partition])
    rows = spark.read.schema(schema).parquet(readable(file)).withColumn(result.partition, sf.lit(None).cast("date"))
    return rows.select(*result.schema.names)


def read_dated(spark: SparkSession, out: Place, result: Result, as_of: date) -> DataFrame:
    """Read the rows dated `as_of`.

    Raises:
        FileNotFoundError: no run has written results of that day to `out`.
    """
    if not is_stored(out, result, as_of):
        raise FileNotFoundError(
            f"{out}/{result.place(as_of)}: there are no results as of {as_of}; run `federation analytics run` for a"
            " window that ends with it"
        )
    if isinstance(out, Snapshot):
        return out.read(spark, result.schema, result.place(as_of))
    return _read(spark, out, result, [readable(result.file(out, as_of))])


def _read(spark: SparkSession, out: Path, result: Result, files: list[str]) -> DataFrame:
    root = local(out / result.name)
    read = spark.read.schema(result.schema).option("basePath", root).parquet(*files)
    return read.select(*result.schema.names)
