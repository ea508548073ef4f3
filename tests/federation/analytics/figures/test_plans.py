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
from federation.analytics.frames import ATTEMPTS, BLACKLIST, HEALTH_EVENTS, SERVERS, Inputs, Outputs
from tests.federation.analytics.rows import NOW, WINDOW, frame

ATTEMPTED: Final = 40_000
OUTPUTS: Final = [field.name for field in fields(Outputs)]
NEVER_COUNTED: Final = {"delivery_id", "job_name", "method", "attempt"}


@pytest.fixture(scope="module")
def attempts(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    """Attempts of two days as they are exported, half of them to one server; only one of the days is read."""
    path = tmp_path_factory.mktemp("exports") / "attempts"
    write_attempts(spark, path)
    return spark.read.parquet(str(path)).where(F.col("day").between(F.lit("2026-11-20"), F.lit("2026-11-20")))


def write_attempts(spark: SparkSession, path: Path) -> None:
    number = F.col("id")
    values = {
        "delivery_id": F.concat(F.lit("delivery "), number),
        "job_name": F.lit("deliver-post"),
        "method": F.lit("FEDERATE_POST"),
        "server_url": F.when(number % 2 == 0, "https://hot.example").otherwise(
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
    settings = {"spark.sql.maxMetadataStringLength": "10000", "spark.sql.adaptive.enabled": "true"}
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


@pytest.mark.parametrize("name", ["server_daily", "network_summary"])
def test_only_what_is_counted_is_read(plans: dict[str, str], name: str) -> None:
    """Texts nobody counts, most of the bytes, stay in the files; to look for duplicates two numbers are read."""
    schemas = [set(re.findall(r"(\w+):", schema)) for schema in re.findall(r"ReadSchema: struct<([^>]*)>", plans[name])]
    assert {"id", "started_at"} in schemas
    assert not any(schema & NEVER_COUNTED for schema in schemas)


def test_other_days_are_not_opened(plans: dict[str, str]) -> None:
    """The filter by day reaches the directories, the one by time the files' own statistics."""
    scans = re.findall(r"FileScan parquet.*", plans["server_daily"])
    assert len(scans) == 4  # rows and ids, each for those alone and those with copies
    for scan in scans:
        assert re.search(r"PartitionFilters: \[[^]]*day#\d+ >= 2026-11-20", scan)
        assert re.search(r"PushedFilters: \[[^]]*GreaterThanOrEqual\(started_at,2026-11-01", scan)


def test_partial_results_are_shuffled_not_rows(plans: dict[str, str]) -> None:
    """Under the exchange by server there is an aggregation begun already."""
    exchanges = re.split(r"Exchange hashpartitioning\(server_url#\d+, day#\d+, outcome", plans["server_daily"])[1:]
    assert exchanges
    for under in exchanges:
        assert "partial_percentile_approx" in under.splitlines()[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shuffled:
    """What the stages of one computation wrote for each other, and the most one task read of it."""

    written: int
    most_read: int


def shuffled_by(spark: SparkSession, output: DataFrame) -> Shuffled:
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
    return Shuffled(written=sum(stage.shuffleWriteRecords() for stage in fresh), most_read=max(read))


def stages_of(store: Any, spark: SparkSession) -> list[Any]:
    jvm: Any = spark._jvm
    none = jvm.java.util.ArrayList()
    quantiles = spark.sparkContext._gateway.new_array(jvm.double, 0)  # type: ignore[union-attr] # a running session has one
    stages = store.stageList(none, False, False, quantiles, none)
    return [stages.apply(index) for index in range(stages.size())]


def test_a_server_with_half_of_all_traffic_is_no_tasks_own_work(spark: SparkSession, attempts: DataFrame) -> None:
    """Tasks hand on a few rows per server, whatever its traffic: far fewer in all than the attempts of that server."""
    good = check_attempts(attempts, window=WINDOW, now=NOW).good
    shuffled = shuffled_by(spark, server_daily(good))
    assert 0 < shuffled.written < ATTEMPTED / 20
    assert shuffled.most_read < ATTEMPTED / 20
