"""Written results: each day whole, replaced or untouched, whatever happens to the run."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from federation.analytics import frames
from federation.analytics.data import sinks
from federation.analytics.data.results import (
    DAILY,
    DATED,
    KEY_ANOMALIES,
    NETWORK_SUMMARY,
    QUARANTINE,
    SERVER_DAILY,
    Result,
    read_dated,
    read_days,
    read_undated,
)
from federation.analytics.data.sinks import write_outputs
from federation.analytics.errors import DirectoryUnusable
from federation.analytics.frames import Window
from tests.federation.analytics.story import AS_OF, SICK, make_outputs
from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[4]
LAST_DAYS = Window(since=AS_OF - timedelta(days=1), until=AS_OF + timedelta(days=1))
EARLIER = AS_OF - timedelta(days=2)
THREE_DAYS = Window(since=EARLIER, until=LAST_DAYS.until)


@pytest.fixture(scope="module")
def first_run(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written once, to be copied."""
    directory = tmp_path_factory.mktemp("first-run") / "out"
    write_outputs(make_outputs(spark, SICK[:1]), directory, THREE_DAYS)
    return directory


@pytest.fixture
def out(first_run: Path, tmp_path: Path) -> Path:
    """A directory with the results of a run over three days."""
    return shutil.copytree(first_run, tmp_path / "out")


def content(out: Path) -> dict[str, list[dict[str, Any]]]:
    """Every file's rows in their order, by its path."""
    files = sorted(path for path in out.rglob("*") if path.is_file())
    return {str(file.relative_to(out)): pyarrow.parquet.ParquetFile(file).read().to_pylist() for file in files}


def daily_row(url: str, day: date) -> tuple[object, ...]:
    return (url, day, 10, 9, 1, 0, 0, {"TIMEOUT": 1}, 0.0, 1, 1, 0.9, 1, 2, 3, 0, {12: 1})


def test_what_is_read_back_is_what_was_computed(spark: SparkSession, tmp_path: Path) -> None:
    """All six frames, each row of the window's days, with its types; a file each, sorted, and nothing else."""
    outputs = make_outputs(spark, SICK)
    write_outputs(outputs, tmp_path, LAST_DAYS)
    for result in DAILY:
        computed = (
            getattr(outputs, result.name).where(sf.col("day").isNull() | (sf.col("day") >= LAST_DAYS.since)).collect()
        )
        read = read_days(spark, tmp_path, result, LAST_DAYS.days).unionByName(read_undated(spark, tmp_path, result))
        assert sorted(map(repr, read.collect())) == sorted(map(repr, computed)), result.name
        assert read.dtypes == [(field.name, field.dataType.simpleString()) for field in result.schema]
    for result in DATED:
        read = read_dated(spark, tmp_path, result, AS_OF)
        assert sorted(map(repr, read.collect())) == sorted(map(repr, getattr(outputs, result.name).collect()))
    written = content(tmp_path)
    files = [result.file(tmp_path, day) for result in DAILY for day in LAST_DAYS.days]
    files += [result.file(tmp_path, AS_OF) for result in DATED]
    files.append(QUARANTINE.file(tmp_path, None))
    assert set(written) == {str(file.relative_to(tmp_path)) for file in files}
    urls = [row["server_url"] for row in written[str(SERVER_DAILY.file(tmp_path, AS_OF).relative_to(tmp_path))]]
    assert urls == sorted(character.url for character in SICK)


def test_a_day_is_replaced_and_the_others_are_not_touched(spark: SparkSession, out: Path) -> None:
    """Late data change the days of the window, byte for byte nothing else; writing the same twice changes no row."""
    before = content(out)
    kept = [result.file(out, EARLIER) for result in DAILY]
    identity = [(file.stat().st_ino, file.read_bytes()) for file in kept]

    late = [daily_row("https://late.example", day) for day in THREE_DAYS.days]
    write_outputs(make_outputs(spark, SICK[:1], server_daily=late), out, LAST_DAYS)
    assert [(file.stat().st_ino, file.read_bytes()) for file in kept] == identity
    read = read_days(spark, out, SERVER_DAILY, THREE_DAYS.days).orderBy("day").collect()
    assert [row.server_url for row in read] == [SICK[0].url, "https://late.example", "https://late.example"]

    write_outputs(make_outputs(spark, SICK[:1]), out, LAST_DAYS)
    assert content(out) == before


def test_a_day_and_a_frame_without_rows_take_the_place_of_those_with_rows(spark: SparkSession, out: Path) -> None:
    """Nothing found is a result: the files are there, with their columns, and empty."""
    only_last = [daily_row("https://a.example", AS_OF)]
    nothing = make_outputs(spark, SICK[:1], server_daily=only_last, network_summary=[], quarantine=[])
    write_outputs(nothing, out, LAST_DAYS)
    assert [row.day for row in read_days(spark, out, SERVER_DAILY, LAST_DAYS.days).collect()] == [AS_OF]
    assert read_days(spark, out, NETWORK_SUMMARY, LAST_DAYS.days).count() == 0
    assert read_days(spark, out, QUARANTINE, LAST_DAYS.days).count() == 0
    assert read_undated(spark, out, QUARANTINE).count() == 0
    empty = pyarrow.parquet.ParquetFile(SERVER_DAILY.file(out, LAST_DAYS.since))
    assert empty.metadata.num_rows == 0
    assert empty.schema_arrow.names == [name for name in frames.SERVER_DAILY.names if name != "day"]


def test_what_is_set_aside_stays_when_fewer_days_are_computed(spark: SparkSession, tmp_path: Path) -> None:
    """Each day's rows are replaced with the day; those of no day each time, as each run reads all of them."""
    days = list(THREE_DAYS.days)
    rows = [("attempts", "unknown error code", day, "{}") for day in (*days, None)]
    write_outputs(make_outputs(spark, SICK[:1], quarantine=rows), tmp_path, THREE_DAYS)
    fresh = [("attempts", "negative size", day, "{}") for day in (*days, None)]
    write_outputs(make_outputs(spark, SICK[:1], quarantine=fresh), tmp_path, LAST_DAYS)
    kept = read_days(spark, tmp_path, QUARANTINE, days).orderBy("day").collect()
    assert [(row.day, row.reason) for row in kept] == [
        (days[0], "unknown error code"),
        (days[1], "negative size"),
        (days[2], "negative size"),
    ]
    assert [row.reason for row in read_undated(spark, tmp_path, QUARANTINE).collect()] == ["negative size"]


def test_results_of_days_to_come_are_removed(spark: SparkSession, tmp_path: Path) -> None:
    """A clock was wrong; that of tomorrow stays, as it may be elsewhere already."""
    far, near = "2999-01-01", (datetime.now(UTC).date() + timedelta(days=1)).isoformat()
    for name in (f"server_daily/day={far}", f"server_scorecard/as_of={far}", f"server_daily/day={near}"):
        (tmp_path / name).mkdir(parents=True)
    write_outputs(make_outputs(spark, SICK[:1]), tmp_path, LAST_DAYS)
    assert not list(tmp_path.glob(f"*/*={far}"))
    assert (tmp_path / f"server_daily/day={near}").exists()


def test_results_that_were_never_written_are_named(spark: SparkSession, tmp_path: Path) -> None:
    """Dated results that are missing are an error that says what to run; days that are missing have no rows."""
    with pytest.raises(FileNotFoundError, match=r"key_anomalies/as_of=2026-03-30.*federation analytics run"):
        read_dated(spark, tmp_path, KEY_ANOMALIES, AS_OF)
    assert read_days(spark, tmp_path, SERVER_DAILY, LAST_DAYS.days).collect() == []


def test_a_run_that_fails_leaves_everything_as_it_was(spark: SparkSession, out: Path) -> None:
    """Even where it fails at the last frame; nothing of it stays."""
    before = content(out)
    late = [daily_row("https://late.example", AS_OF)]
    good = make_outputs(spark, SICK[:1], server_daily=late)
    broken = good.quarantine.withColumn("reason", sf.raise_error(sf.lit("a broken disk")).cast("string"))
    failing = frames.Outputs(**{name: getattr(good, name) for name in good.__slots__} | {"quarantine": broken})
    with pytest.raises(PySparkException, match="a broken disk"):
        write_outputs(failing, out, LAST_DAYS)
    assert content(out) == before
    assert not (out / ".staging").exists()


@pytest.mark.parametrize("few", [True, False])
def test_few_rows_are_computed_as_such(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: bool
) -> None:
    """Once the daily rows are there, and it is known how many they are."""
    setting = "spark.sql.shuffle.partitions"
    before = spark.conf.get(setting) or ""
    outputs = make_outputs(spark, SICK[:1])
    if not few:
        monkeypatch.setattr(sinks, "_FEW_BYTES", 0)
    spark.conf.set(setting, "5")
    seen: dict[str, str | None] = {}
    try:
        write_outputs(outputs, tmp_path, LAST_DAYS, told=lambda text: seen.update({text: spark.conf.get(setting)}))
        assert spark.conf.get(setting) == "5"
    finally:
        spark.conf.set(setting, before)
    first, *others, last = seen.items()
    assert (first, last) == (("computing server_daily", "5"), ("putting the results in place", "5"))
    assert {value for _, value in others} == {"1" if few else "5"}


def test_a_second_run_at_the_same_time_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """It says that another one writes there, and the other's files stay."""
    mine = tmp_path / ".staging"
    mine.mkdir()
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(DirectoryUnusable, match="another run is writing"):
            write_outputs(make_outputs(spark, SICK[:1]), tmp_path, LAST_DAYS)
    finally:
        os.close(descriptor)
    assert list(tmp_path.iterdir()) == [mine]


CHILD = """
import os, pathlib, signal, sys
from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession
from federation.analytics.data.sinks import write_outputs
from tests.federation.analytics.story import SICK, make_outputs
from tests.federation.analytics.data.test_sinks import LAST_DAYS, daily_row

replace, left = pathlib.Path.replace, int(sys.argv[2])

def replace_or_die(source, target):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    return replace(source, target)

pathlib.Path.replace = replace_or_die
gateway = launch_gateway()
session = gateway.jvm.SparkSession.getDefaultSession().get()
java = gateway.jvm.JavaSparkContext.fromSparkContext(session.sparkContext())
spark = SparkSession(SparkContext(gateway=gateway, jsc=java, conf=SparkConf(_jconf=java.getConf())), session)
late = [daily_row("https://late.example", day) for day in LAST_DAYS.days]
write_outputs(make_outputs(spark, SICK[:1], server_daily=late, quarantine=[]), pathlib.Path(sys.argv[1]), LAST_DAYS)
"""
"""Its Spark is that of the tests, which survives it: another JVM would take longer to start than all of this."""


def write_and_die(spark: SparkSession, out: Path, *, after: int) -> subprocess.CompletedProcess[str]:
    """How a process ended that writes `out` and is killed after that many files."""
    java = spark.sparkContext._gateway.java_parameters  # type: ignore[union-attr] # a running session has one
    variables = {"PYSPARK_GATEWAY_PORT": str(java.port), "PYSPARK_GATEWAY_SECRET": java.auth_token}
    environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CHILD, str(out), str(after)]
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    finally:
        spark.catalog.clearCache()  # it could not release what it kept


def test_killed_between_two_files_every_day_is_the_old_or_the_new_one(spark: SparkSession, out: Path) -> None:
    """The first day is replaced, the second not, neither is half; the next run tidies and completes it."""
    died = write_and_die(spark, out, after=1)
    assert died.returncode == -signal.SIGKILL, died.stderr
    first, second = (urls(spark, out, SERVER_DAILY, day) for day in LAST_DAYS.days)
    assert (first, second) == (["https://late.example"], [SICK[0].url])
    aside = read_days(spark, out, QUARANTINE, [AS_OF]).unionByName(read_undated(spark, out, QUARANTINE))
    assert aside.count() == 5
    assert (out / ".staging").is_dir()

    write_outputs(make_outputs(spark, SICK[:1]), out, LAST_DAYS)
    assert [urls(spark, out, SERVER_DAILY, day) for day in LAST_DAYS.days] == [[SICK[0].url]] * 2
    assert not (out / ".staging").exists()


def urls(spark: SparkSession, out: Path, result: Result, day: date) -> list[str]:
    return [row.server_url for row in read_days(spark, out, result, [day]).collect()]
