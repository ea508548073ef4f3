"""What Spark is asked to do: nothing per attempt in Python, nothing quadratic, no more bytes than needed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation gives it

from federation.analytics.figures.checks import check_attempts
from federation.analytics.figures.compute import compute
from federation.analytics.figures.daily import server_daily
from federation.analytics.figures.tally import good, tally
from federation.analytics.frames import ATTEMPTS, BLACKLIST, HEALTH_EVENTS, SERVERS, Inputs, Outputs
from tests.federation.analytics.rows import NOW, WINDOW, frame

ATTEMPTED: Final = 40_000
OUTPUTS: Final = [field.name for field in fields(Outputs) if field.name != "counts"]
HOT: Final = "https://hot.example"


@pytest.fixture(scope="module")
def attempts(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    """Attempts of two days as they are exported, half of them to one server; only one of the days is read."""
    path = tmp_path_factory.mktemp("exports") / "attempts"
    write_attempts(spark, path)
    # Spark's accounts lack what Parquet reads in several ranges at once.
    read = spark.read.option("parquet.hadoop.vectored.io.enabled", "false")
    return read.parquet(str(path)).where(F.col("day").between(F.lit("2026-11-20"), F.lit("2026-11-20")))


def write_attempts(spark: SparkSession, path: Path) -> None:
    number = F.col("id")
    values = {
        "delivery_id": F.sha1(number.cast("string")),
        "job_name": F.lit("deliver-post"),
        "method": F.lit("FEDERATE_POST"),
        "server_url": F.when(number % 2 == 0, HOT).otherwise(
            F.concat(F.lit("https://s"), number % 49, F.lit(".example"))
        ),
        "attempt": F.lit(1),
        "started_at": F.timestamp_seconds(1_795_132_800 + number * 2 * 86_400 / (2 * ATTEMPTED)),
        "duration_ms": (number % 1000).cast("int"),
        "outcome": F.when(number % 10 == 0, "retryable").otherwise("delivered"),
        "error_code": F.when(number % 10 == 0, "TIMEOUT"),
        "http_status": F.when(number % 10 != 0, 200),
        "relayed_by": F.lit(None).cast("string"),
        "request_bytes": F.lit(1000),
        "response_bytes": F.lit(500),
        "unreadable": F.lit(None).cast("string"),
    }
    rows = spark.range(0, 2 * ATTEMPTED, 1, 4).withColumns(values).select(*ATTEMPTS.fieldNames())
    rows.withColumn("day", F.to_date("started_at")).write.partitionBy("day").parquet(str(path))


@pytest.fixture(scope="module")
def plans(spark: SparkSession, attempts: DataFrame) -> Iterator[dict[str, str]]:
    """The physical plan of each output, over the plans of what the session keeps."""
    settings = {
        "spark.sql.maxMetadataStringLength": "10000",
        "spark.sql.debug.maxToStringFields": "100",
        "spark.sql.adaptive.enabled": "true",
    }
    before = {name: spark.conf.get(name) or "" for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    outputs = compute(
        Inputs(
            attempts=attempts,
            servers=frame(spark, SERVERS),
            blacklist=frame(spark, BLACKLIST),
            health_events=frame(spark, HEALTH_EVENTS),
            earlier_servers=frame(spark, SERVERS),
        ),
        window=WINDOW,
        now=NOW,
    )
    yield {name: plan_of(getattr(outputs, name)) for name in OUTPUTS}
    for name, value in before.items():
        spark.conf.set(name, value)


def plan_of(output: DataFrame) -> str:
    """The physical plan as text; Python has no public way to it but printing."""
    return str(output._jdf.queryExecution().executedPlan().toString())


@pytest.mark.parametrize("name", OUTPUTS)
def test_no_row_goes_through_python(plans: dict[str, str], name: str) -> None:
    """A Python function costs a process, a copy and a hundred times the time per row."""
    assert not re.findall(r"Python|Pandas|Arrow", plans[name])


@pytest.mark.parametrize("name", OUTPUTS)
def test_nothing_is_joined_with_everything(plans: dict[str, str], name: str) -> None:
    """Every join has equal keys, so none grows with the product of its sides."""
    assert not re.findall(r"CartesianProduct|BroadcastNestedLoopJoin", plans[name])


def test_other_days_are_not_opened(plans: dict[str, str]) -> None:
    """The filter by day reaches the directories, the one by time the files' own statistics."""
    scans = re.findall(r"FileScan parquet.*", plans["server_daily"])
    assert len(scans) == 4  # rows and ids, each for those alone and those with copies
    for scan in scans:
        assert re.search(r"PartitionFilters: \[[^]]*day#\d+ >= 2026-11-20", scan)
    by_time = [re.search(r"PushedFilters: \[[^]]*GreaterThanOrEqual\(started_at,2026-11-01", scan) for scan in scans]
    assert len(list(filter(None, by_time))) == 2


def test_partial_results_are_shuffled_not_rows(plans: dict[str, str]) -> None:
    """Under the exchange by server there is an aggregation begun already."""
    exchanges = re.split(r"Exchange hashpartitioning\(server_url#\d+, day#\d+, error_code", plans["server_daily"])[1:]
    assert exchanges
    for under in exchanges:
        assert "partial_count" in under.splitlines()[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The bytes that one computation read from files, what its stages wrote for each other, and the most one task read
    of that."""

    file_bytes: int
    written: int
    most_read: int


def moved_by(spark: SparkSession, output: DataFrame) -> Moved:
    """Compute `output` and ask Spark's own accounts; they are kept without its web pages, too."""
    context: Any = spark.sparkContext._jsc.sc()
    store = context.statusStore()
    before = {stage.stageId() for stage in stages_of(store, spark)}
    output.write.format("noop").mode("overwrite").save()
    context.listenerBus().waitUntilEmpty()
    fresh = [stage for stage in stages_of(store, spark) if stage.stageId() not in before]
    read = [0]
    for stage in fresh:
        tasks = store.taskList(stage.stageId(), stage.attemptId(), 1000)
        for index in range(tasks.size()):
            metrics = tasks.apply(index).taskMetrics()
            if metrics.isDefined():
                read.append(metrics.get().shuffleReadMetrics().recordsRead())
    return Moved(
        file_bytes=sum(stage.inputBytes() for stage in fresh),
        written=sum(stage.shuffleWriteRecords() for stage in fresh),
        most_read=max(read),
    )


def stages_of(store: Any, spark: SparkSession) -> list[Any]:
    jvm: Any = spark._jvm
    none = jvm.java.util.ArrayList()
    quantiles = spark.sparkContext._gateway.new_array(jvm.double, 0)  # type: ignore[union-attr] # a running session has one
    stages = store.stageList(none, False, False, quantiles, none)
    return [stages.apply(index) for index in range(stages.size())]


def counted(attempts: DataFrame) -> DataFrame:
    return tally(check_attempts(attempts, window=WINDOW, now=NOW))


def test_attempts_are_read_once(spark: SparkSession, attempts: DataFrame) -> None:
    """All bytes once, and the ids before; again only where there are copies to tell apart."""
    files = (Path(file.removeprefix("file:")) for file in attempts.inputFiles())
    size = sum(file.stat().st_size for file in files if file.parent.name == "day=2026-11-20")
    spark.conf.set("spark.sql.adaptive.enabled", "true")
    try:
        clean, copied = (moved_by(spark, counted(rows)) for rows in (attempts, attempts.union(attempts)))
    finally:
        spark.conf.set("spark.sql.adaptive.enabled", "false")
    assert 0.9 * size < clean.file_bytes < 1.1 * size
    assert copied.file_bytes > 3 * size


def test_a_server_with_half_of_all_traffic_is_no_tasks_own_work(spark: SparkSession, attempts: DataFrame) -> None:
    """Tasks hand on a count per millisecond that its deliveries took, and no attempts: far fewer."""
    counts = counted(attempts.where(F.col("server_url") == HOT))
    moved = moved_by(spark, server_daily(good(counts)))
    assert 0 < moved.written < ATTEMPTED / 2 / 5
    assert moved.most_read < ATTEMPTED / 2 / 10
