"""The Java that Spark needs: found, or told in one line what to install."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation gives it

from federation.analytics import session as session_module
from federation.analytics.errors import AnalyticsError, JavaNotFound
from federation.analytics.session import (
    divide_work,
    few_rows,
    find_java,
    jvm_options,
    keeping,
    require_same_spark,
)


@pytest.fixture
def bin_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory of programs; JAVA_HOME is not set."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    return directory


def put_java(directory: Path, text: str, status: int = 0) -> Path:
    """A `java` that tells its version as real ones do: on stderr."""
    program = directory / "java"
    program.write_text(f"#!/bin/sh\necho '{text}' >&2\nexit {status}\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize("version", ["17.0.15", "21", "25.0.1"])
def test_a_java_that_is_new_enough_is_found(bin_directory: Path, version: str) -> None:
    """On PATH, whatever else it prints."""
    program = put_java(bin_directory, f'Picked up JAVA_TOOL_OPTIONS\nopenjdk version "{version}" 2025-04-15')
    assert find_java() == program


def test_java_home_comes_first(bin_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does for Spark."""
    put_java(bin_directory, 'openjdk version "17.0.1"')
    home = tmp_path / "home"
    (home / "bin").mkdir(parents=True)
    program = put_java(home / "bin", 'openjdk version "21.0.1"')
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert find_java() == program


@pytest.mark.parametrize(
    ("text", "status", "problem"),
    [
        pytest.param('java version "1.8.0_402"', 0, "is Java 8:", id="8"),
        pytest.param('openjdk version "11.0.22"', 0, "is Java 11:", id="11"),
        pytest.param("hello", 0, "is Java of an unknown version", id="unknown"),
        pytest.param("no runtime present", 1, "does not run", id="broken"),
    ],
)
def test_an_unusable_java_is_told_with_what_to_install(
    bin_directory: Path, text: str, status: int, problem: str
) -> None:
    """In one line."""
    put_java(bin_directory, text, status)
    with pytest.raises(JavaNotFound) as error:
        find_java()
    assert problem in str(error.value)
    assert "install Java 17 or newer" in str(error.value)
    assert "\n" not in str(error.value)


def test_no_java_at_all_is_told(bin_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when JAVA_HOME points nowhere."""
    with pytest.raises(JavaNotFound, match="no `java` on PATH: install Java 17"):
        find_java()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaNotFound, match=f"JAVA_HOME={tmp_path} holds no Java that runs: install Java 17"):
        find_java()


def test_much_work_is_worth_a_compiler_that_takes_longer() -> None:
    """Few attempts are counted before it would be of use."""
    few, much = (jvm_options(None, work) for work in (2**20, 2**30))
    assert ("-XX:TieredStopAtLevel=1" in few, "-XX:TieredStopAtLevel=1" in much) == (True, False)


def test_the_session_computes_in_utc(spark: SparkSession) -> None:
    """Whatever the machine's zone is, and says so in Parquet."""
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.sql.parquet.outputTimestampType") == "TIMESTAMP_MICROS"


def test_what_is_shuffled_is_divided_by_its_size(spark: SparkSession) -> None:
    """A task holds a share of much, and little is not many tasks' work."""
    setting = "spark.sql.shuffle.partitions"
    before = spark.conf.get(setting) or ""
    try:
        found = []
        for rows in (1, 2**27, 2**40):
            divide_work(spark.range(rows))  # 8 bytes each
            found.append(spark.conf.get(setting))
        assert found == ["2", "64", "1000"]
        divide_work(spark.range(2**40), 2**30)
        assert spark.conf.get(setting) == "64"
    finally:
        spark.conf.set(setting, before)


@pytest.mark.parametrize("few", [True, False])
def test_few_rows_are_one_tasks_work_and_the_session_stays_as_it_was(spark: SparkSession, few: bool) -> None:
    """Whatever happens meanwhile; many rows are divided as they were."""
    setting, adaptive = "spark.sql.shuffle.partitions", "spark.sql.adaptive.enabled"
    before = {name: spark.conf.get(name) or "" for name in (setting, adaptive)}
    spark.conf.set(setting, "5")
    spark.conf.set(adaptive, "false")  # which would join five small parts
    try:
        with contextlib.suppress(ValueError), few_rows(spark, when=few):
            shuffled = spark.range(10).repartition("id")
            assert shuffled.rdd.getNumPartitions() == (1 if few else 5)
            raise ValueError
        assert spark.conf.get(setting) == "5"
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)


def test_a_frame_that_is_kept_is_computed_once(spark: SparkSession) -> None:
    """Each row is made once, though two frames and a join of both are made of it; nothing of it stays."""
    made = spark.sparkContext.accumulator(0)

    def count(number: int) -> tuple[int, int]:
        made.add(1)
        return number, number % 3

    rows = spark.createDataFrame(spark.sparkContext.parallelize(range(20), 2).map(count), "number int, rest int")
    with keeping() as keep:
        kept = keep(rows)
        sums = kept.groupBy("rest").agg(F.sum("number").alias("sum"))
        joined = kept.join(sums, "rest").join(kept.withColumnRenamed("rest", "again"), "number")
        assert sum(row["number"] for row in kept.collect()) == 190
        assert {row["sum"] for row in joined.collect()} == {63, 70, 57}
        assert made.value == 20
        assert rows.is_cached
    assert not rows.is_cached


def test_a_plan_is_not_that_of_what_is_kept(spark: SparkSession) -> None:
    """What is made of it begins with it, so it is planned in no time."""
    rows = spark.range(5).withColumn("twice", F.col("id") * 2)
    with keeping(few_servers=True) as keep:
        for kept in (keep(rows), keep(rows.where("id > 1"), by_server=True)):
            assert kept.columns == ["id", "twice"]
            plan = str(kept.select("twice")._jdf.queryExecution().analyzed().treeString())
            assert plan.splitlines()[1].startswith("+- InMemoryRelation")


def test_a_cluster_of_another_spark_is_told() -> None:
    """By both versions; a patch does not matter."""
    major, minor = pyspark.__version__.split(".")[:2]
    require_same_spark(f"{major}.{minor}.99")
    for other in (f"{major}.{int(minor) + 1}.0", f"{int(major) - 1}.{minor}.0"):
        with pytest.raises(AnalyticsError, match=rf"Spark that runs is {other}, and PySpark here is {major}\.{minor}"):
            require_same_spark(other)


def test_all_that_reaches_into_the_jvm_stands_in_one_module() -> None:
    """What is not public changes with each version of Spark, and does not exist in Spark Connect."""
    private = re.compile(r"\._(jdf|jvm|jsc|gateway|jsparkSession)\b")
    package = Path(session_module.__file__).parent
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if private.search(path.read_text())}
    assert found == {"jvm.py"}
