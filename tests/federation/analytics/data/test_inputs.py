"""Reading exports: files of others are refused by name, before Spark stumbles over them."""

from __future__ import annotations

import re
import shutil
from datetime import timedelta
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import to_arrow_schema

from federation.analytics import frames
from federation.analytics.data.inputs import read_exports
from federation.analytics.errors import DamagedExport, DirectoryUnusable, first_cause
from federation.analytics.frames import Window
from tests.federation.analytics.history import DAY, attempt, moment

WINDOW = Window(since=DAY, until=DAY + timedelta(days=1))


@pytest.fixture
def exports(tmp_path: Path) -> Path:
    """One day with one attempt, and no server, written by somebody else than Spark."""
    write(tmp_path / "attempts" / f"day={DAY}" / "a.parquet", day_of_one())
    write(tmp_path / "servers" / "a.parquet", to_arrow_schema(frames.SERVERS).empty_table())
    return tmp_path


def day_of_one() -> pyarrow.Table:
    return pyarrow.Table.from_pylist([attempt(1, moment())], to_arrow_schema(frames.ATTEMPTS))


def write(file: Path, table: pyarrow.Table) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(table, file)
    return file


def test_what_is_missing_is_empty(spark: SparkSession, exports: Path) -> None:
    """Exports need neither a blacklist nor events; a window without days is empty too."""
    inputs = read_exports(spark, exports, WINDOW)
    assert [row.started_at.day for row in inputs.attempts.collect()] == [1]
    assert (inputs.attempts.schema, inputs.blacklist.schema) == (frames.ATTEMPTS, frames.BLACKLIST)
    assert [inputs.blacklist.count(), inputs.health_events.count()] == [0, 0]
    later = Window(since=DAY + timedelta(days=5), until=DAY + timedelta(days=6))
    assert read_exports(spark, exports, later).attempts.count() == 0


def test_a_directory_without_exports_is_told(spark: SparkSession, tmp_path: Path) -> None:
    """With what makes them."""
    with pytest.raises(DirectoryUnusable, match=r"no exports in .*`federation analytics export`"):
        read_exports(spark, tmp_path / "none", WINDOW)


@pytest.mark.parametrize("size", [0, 3, 100, -1])
def test_a_half_written_file_is_refused_by_name(spark: SparkSession, exports: Path, size: int) -> None:
    """However much of it was written; one of another day does no harm."""
    file = exports / "attempts" / f"day={DAY}" / "a.parquet"
    torn = file.with_name("torn.parquet")
    torn.write_bytes(file.read_bytes()[:size])
    with pytest.raises(DamagedExport, match=r"torn\.parquet is no complete Parquet file"):
        read_exports(spark, exports, WINDOW)
    other = exports / "attempts" / "day=2024-12-31" / "torn.parquet"
    other.parent.mkdir()
    torn.rename(other)
    assert read_exports(spark, exports, WINDOW).attempts.count() == 1


def test_a_write_that_did_not_end_is_refused(spark: SparkSession, exports: Path) -> None:
    """Spark's own sign of it: files that are there may not be all."""
    (exports / "attempts" / f"day={DAY}" / "_temporary").mkdir()
    with pytest.raises(DamagedExport, match=r"_temporary was left by a run that did not end"):
        read_exports(spark, exports, WINDOW)


def test_a_file_of_other_columns_is_refused_by_name(spark: SparkSession, exports: Path) -> None:
    """A column that is missing, and one that is of another kind."""
    file = exports / "attempts" / f"day={DAY}" / "odd.parquet"
    write(file, day_of_one().drop_columns(["outcome"]))
    with pytest.raises(DamagedExport, match=r"odd\.parquet has no column 'outcome'"):
        read_exports(spark, exports, WINDOW)
    table = day_of_one()
    index = table.schema.get_field_index("duration_ms")
    write(file, table.set_column(index, "duration_ms", pyarrow.array(["long"])))
    with pytest.raises(DamagedExport, match=r"odd\.parquet: column 'duration_ms' is string, not int32"):
        read_exports(spark, exports, WINDOW)


def test_times_in_units_that_spark_cannot_read_are_refused_by_column(spark: SparkSession, exports: Path) -> None:
    """Nanoseconds are what others write by default."""
    table = day_of_one()
    index = table.schema.get_field_index("started_at")
    nanoseconds = table.column(index).cast(pyarrow.timestamp("ns", tz="UTC"))
    write(exports / "attempts" / f"day={DAY}" / "odd.parquet", table.set_column(index, "started_at", nanoseconds))
    with pytest.raises(DamagedExport, match=r"odd\.parquet: column 'started_at' is timestamp\[ns, tz=UTC\], not"):
        read_exports(spark, exports, WINDOW)


def test_a_damaged_page_is_told_by_its_file(
    spark: SparkSession, exports: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its footer is whole, so only reading it tells; in a line, and no stack with it."""
    rows = [attempt(number, moment(), delivery_id=f"{number * 7919:032x}") for number in range(3_000)]
    file = exports / "attempts" / f"day={DAY}" / "a.parquet"
    write(file, pyarrow.Table.from_pylist(rows, to_arrow_schema(frames.ATTEMPTS)))
    data = bytearray(file.read_bytes())
    data[4:4_000] = bytes(3_996)
    file.write_bytes(data)
    inputs = read_exports(spark, exports, WINDOW)
    with pytest.raises((PySparkException, Py4JJavaError)) as error:
        inputs.attempts.select("id", "delivery_id").collect()
    assert re.fullmatch(r"/\S+/a\.parquet is damaged, or no Parquet .*", first_cause(error.value))
    assert "\tat " not in capfd.readouterr().err


def test_paths_are_names_and_no_patterns(spark: SparkSession, exports: Path) -> None:
    """Spark would look for others, or read those of several directories."""
    for name in ("p*", "p[1]", "p{a,b}", "p?", "p q", "p%20", "p1"):
        copy = exports / name
        for part in ("attempts", "servers"):
            shutil.copytree(exports / part, copy / part)
        assert read_exports(spark, copy, WINDOW).attempts.count() == 1, name
