"""The data source `federation` in Spark: the values it brings, without more than was asked for and without a secret."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys

import pytest
import sqlalchemy
from pyspark import cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program gives it
from pyspark.sql.types import StructType

from federation.analytics import frames
from federation.analytics.data.source import FederationSource
from federation.analytics.data.tables import TABLES, TablePart, TableReader
from federation.analytics.source import read_table, register
from tests.federation.analytics.history import SERVERS, attempt, attempts, execute, fill, moment
from tests.workers.manual import ROOT, examples

ATTEMPTS = "delivery_attempts"


def test_every_table_arrives_with_its_values(spark: SparkSession, database_url: str) -> None:
    """Texts, numbers, truth values, instants and nulls, on both databases."""
    register(spark)
    fill(database_url, [attempt(1, moment(0, 1.5), error_code="HTTP_503", http_status=503, response_bytes=None)])
    [row] = read_table(spark, database_url, ATTEMPTS).collect()
    assert (row.id, row.delivery_id, row.outcome, row.http_status) == (1, "delivery-1", "delivered", 503)
    assert (row.duration_ms, row.error_code, row.relayed_by, row.response_bytes) == (101, "HTTP_503", None, None)
    seconds = read_table(spark, database_url, ATTEMPTS).select(F.unix_micros("started_at")).first()
    assert seconds is not None
    assert seconds[0] == moment(0, 1.5).timestamp() * 1_000_000
    servers = read_table(spark, database_url, "server_registry").orderBy("id").collect()
    assert [(each.url, each.is_healthy) for each in servers] == list(zip(SERVERS, [True, False, True], strict=True))
    assert read_table(spark, database_url, "blacklisted_servers").first()["reason"] == "spam"
    events = read_table(spark, database_url, "server_health_events").orderBy("at").collect()
    assert [event.to_state for event in events] == ["unhealthy", "healthy"]


def test_the_program_of_the_manual_runs(
    spark: SparkSession, sqlite_only: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it stands but for the database, which Spark, at work elsewhere already, has to be told by its whole path."""
    fill(sqlite_only, [attempt(1, moment(0, 1.5))])
    shown = examples(ROOT / "federation" / "analytics" / "README.md")["The data source `federation`"]
    relative = "sqlite:///federation.sqlite3"
    assert relative in shown
    exec(compile(shown.replace(relative, sqlite_only), "README.md", "exec"), {})
    assert re.search(r"\|delivered\|\s*1\|", capsys.readouterr().out)


def test_an_empty_table_is_read_as_nothing(spark: SparkSession, database_url: str) -> None:
    """With its columns."""
    register(spark)
    for table, described in TABLES.items():
        frame = read_table(spark, database_url, table)
        assert (frame.schema, frame.count()) == (described.schema, 0)


def test_filters_through_spark_mean_what_spark_means(spark: SparkSession, database_url: str) -> None:
    """The rows are those of the same filter on rows that Spark holds itself."""
    register(spark)
    rows = attempts(40, 3)
    rows = [{**row, "error_code": None if row["id"] % 3 else "TIMEOUT"} for row in rows]
    fill(database_url, rows)
    values = [tuple(row.get(name) for name in frames.ATTEMPTS.names) for row in rows]
    held = spark.createDataFrame(values, frames.ATTEMPTS)
    conditions = [
        (F.col("started_at") >= F.lit("2025-03-02 00:00:00").cast("timestamp")) & (F.col("duration_ms") < 120),
        F.col("started_at") == F.lit("2025-03-02 00:00:00").cast("timestamp"),
        F.col("started_at") <= F.lit("2025-03-01 23:59:59.999999").cast("timestamp"),
        F.col("error_code").isNull() & F.col("server_url").isin(SERVERS[0], "https://none.example"),
        ~F.col("error_code").isin("TIMEOUT", "UNKNOWN"),
        (F.col("server_url") > SERVERS[0]) & (F.col("id") > 100),
        F.col("server_url") == "a\0b",
    ]
    loaded = read_table(spark, database_url, ATTEMPTS)
    expected = held.select("id", *(F.coalesce(condition, F.lit(False)) for condition in conditions)).collect()
    for number, condition in enumerate(conditions, start=1):
        ids = {row.id for row in loaded.where(condition).select("id").collect()}
        assert ids == {row.id for row in expected if row[number]}, condition


def test_only_the_columns_of_the_schema_are_selected(spark: SparkSession, database_url: str) -> None:
    """A Python source gets no column pruning from Spark: the schema given says which columns are read."""
    register(spark)
    fill(database_url, attempts(2, 1))
    schema = StructType([frames.ATTEMPTS["id"], frames.ATTEMPTS["started_at"]])
    statement = str(TableReader({"url": database_url, "table": ATTEMPTS}, schema)._select(TablePart()))
    assert "started_at" in statement
    assert "server_url" not in statement
    frame = read_table(spark, database_url, ATTEMPTS, columns=["started_at", "id"])
    assert frame.columns == ["started_at", "id"]
    assert {row.id for row in frame.collect()} == {1, 2}


def test_values_of_no_kind_become_null(spark: SparkSession, sqlite_only: str) -> None:
    """SQLite keeps a text in a number's column; the row arrives all the same, for the checks to set aside."""
    register(spark)
    fill(sqlite_only, attempts(2, 1))
    changes = "duration_ms = 'long', request_bytes = 99999999999, started_at = 'noon'"
    execute(sqlite_only, sqlalchemy.text(f"UPDATE delivery_attempts SET {changes} WHERE id = 2"))
    row = {each.id: each for each in read_table(spark, sqlite_only, ATTEMPTS).collect()}[2]
    assert (row.duration_ms, row.request_bytes, row.started_at, row.attempt) == (None, None, None, 1)


READS_WITHOUT_US = """
import pickle, sys
sys.modules.update(dict.fromkeys(("federation", "db", "sqlmodel")))
make_source, options = pickle.load(sys.stdin.buffer)
source = make_source(options)
reader = source.reader(source.schema())
print(sum(batch.num_rows for part in reader.partitions() for batch in reader.read(part)))
"""


def test_executors_need_nothing_of_ours(spark: SparkSession, database_url: str) -> None:
    """What reads comes along: a process that can import neither `federation` nor `db` reads the table."""
    register(spark)
    fill(database_url, attempts(10, 2))
    shipped = cloudpickle.dumps((FederationSource, {"url": database_url, "table": ATTEMPTS}))
    done = subprocess.run([sys.executable, "-c", READS_WITHOUT_US], input=shipped, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"20\n"), done.stderr


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        pytest.param({"table": "users"}, "option `table` must be one of delivery_attempts", id="table"),
        pytest.param({"table": ATTEMPTS, "since": "yesterday"}, "option `since` must be a day", id="since"),
        pytest.param({"table": "server_registry", "until": "2025-01-01"}, "has no time", id="no-time"),
    ],
)
def test_wrong_options_are_told(spark: SparkSession, database_url: str, options: dict[str, str], problem: str) -> None:
    """As soon as they can be."""
    register(spark)
    with pytest.raises(PySparkException, match=problem):
        spark.read.format("federation").options(url=database_url, **options).load().count()


def test_no_password_is_shown(spark: SparkSession) -> None:
    """Neither in plans nor in reprs, pickles' reprs and errors; an unreachable server is named."""
    register(spark)
    url = "postgresql://reader:s3cret@127.0.0.1:1/app"
    read = TableReader({"url": url, "table": ATTEMPTS}, TABLES[ATTEMPTS].schema)
    shown = [repr(read), repr(vars(read)), repr(pickle.loads(pickle.dumps(read))), repr(TablePart(column="id", low=1))]
    frame = read_table(spark, url, "server_registry")
    shown += [
        str(frame._jdf.queryExecution().toString()),
        str(frame._jdf.queryExecution().analyzed().treeString()),
    ]
    with pytest.raises(PySparkException) as error:
        frame.count()
    shown += [str(error.value), repr(error.value)]
    assert "127.0.0.1" in shown[-2]
    assert not [text for text in shown if "s3cret" in text]
