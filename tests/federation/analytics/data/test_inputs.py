"""Reading exports: files of others are refused by name, before Spark stumbles over them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import to_arrow_schema

from federation.analytics import frames
from federation.analytics.data.inputs import read_exports
from federation.analytics.errors import DamagedExport, DirectoryUnusable
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
