"""The made-up history: what real exports look like, and the same for the same seed."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program gives it

from db import AttemptOutcome
from federation.analytics import frames
from federation.analytics.data.export import count_rows, exported_days
from federation.analytics.data.inputs import read_exports
from federation.analytics.errors import DirectoryUnusable
from federation.analytics.frames import Inputs, Window
from scripts.made_up import attempts
from scripts.made_up.attempts import make_attempts
from scripts.made_up.generate import generate
from scripts.made_up.servers import History, make_servers

HISTORY = History(attempts=10_000, servers=150, days=9, until=date(2025, 3, 10), seed=1)
WINDOW = Window(since=date(2025, 3, 1), until=date(2025, 3, 10))


@pytest.fixture(scope="module")
def directory(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("generated")
    generate(spark, HISTORY, made)
    return made


@pytest.fixture(scope="module")
def inputs(spark: SparkSession, directory: Path) -> Inputs:
    return read_exports(spark, directory, WINDOW)


def fingerprint(made: DataFrame) -> object:
    columns = [F.xxhash64(*frames.ATTEMPTS.names).alias("hash")]
    row = made.select(*columns).agg(F.count("*"), F.sum(F.col("hash").cast("decimal(38)"))).first()
    assert row is not None
    return tuple(row)


def test_it_is_an_export(directory: Path, inputs: Inputs) -> None:
    """Every day, every row, every table, of the schemas that are read; it is made once."""
    assert exported_days(directory) == list(WINDOW.days)
    assert sum(count_rows(directory / "attempts" / f"day={day}") for day in WINDOW.days) == HISTORY.attempts
    assert inputs.earlier_servers is not None
    assert inputs.servers.count() == HISTORY.servers
    with pytest.raises(DirectoryUnusable, match="holds exports already"):
        generate(inputs.attempts.sparkSession, HISTORY, directory)


def test_the_seed_decides(spark: SparkSession, inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows however the work is divided; others for another seed."""
    monkeypatch.setattr(attempts, "ROWS_PER_TASK", HISTORY.attempts // 5)
    again = make_attempts(spark, HISTORY, make_servers(spark, HISTORY))
    assert again.rdd.getNumPartitions() == 5
    assert fingerprint(again) == fingerprint(inputs.attempts)
    other = replace(HISTORY, seed=2)
    assert fingerprint(make_attempts(spark, other, make_servers(spark, other))) != fingerprint(inputs.attempts)


def test_attempts_look_real(inputs: Inputs) -> None:
    """In the order of time; most delivered, some of every outcome; the busiest server far ahead; nights quiet."""
    made = inputs.attempts
    outcomes = {row.outcome: row["count"] for row in made.groupBy("outcome").count().collect()}
    assert outcomes.keys() == set(AttemptOutcome)
    assert 0.85 < outcomes["delivered"] / HISTORY.attempts < 0.99
    busiest = made.groupBy("server_url").count().orderBy(F.desc("count")).collect()
    assert busiest[0]["count"] > 10 * busiest[50]["count"]
    hours = {row.hour: row["count"] for row in made.groupBy(F.hour("started_at").alias("hour")).count().collect()}
    assert max(hours.values()) > 2 * min(hours.values())
    figures = made.agg(
        F.corr("id", F.unix_micros("started_at")).alias("order"),
        F.min("duration_ms").alias("least"),
        F.count_if((F.col("outcome") == "delivered") != F.col("error_code").isNull()).alias("contradictions"),
    ).first()
    assert figures is not None
    assert figures.order > 0.98
    assert figures.least == -1
    assert figures.contradictions == 0


def test_outages_have_health_events(inputs: Inputs) -> None:
    """A server whose last event says unhealthy is unhealthy, for that reason; during an outage nothing is delivered."""
    last = inputs.health_events.groupBy("server_url").agg(F.max_by(F.struct("to_state", "reason"), "at").alias("last"))
    states = inputs.servers.join(last, inputs.servers.url == last.server_url, "left")
    rows = states.select("is_healthy", "unhealthy_reason", "last.to_state", "last.reason").collect()
    down = [row for row in rows if row.to_state == "unhealthy"]
    assert down
    assert all((row.is_healthy, row.unhealthy_reason) == (False, row.reason) for row in down)
    assert all(row.is_healthy for row in rows if row.to_state != "unhealthy")


def test_one_server_can_have_half_of_the_traffic(spark: SparkSession) -> None:
    """For the skew that a benchmark wants."""
    hot = History(attempts=20_000, servers=300, days=2, until=date(2025, 3, 10), hot_share=0.5)
    counts = make_attempts(spark, hot, make_servers(spark, hot)).groupBy("server_url").count()
    assert 0.5 < counts.agg(F.max("count")).collect()[0][0] / hot.attempts < 0.65


def test_the_registry_has_suspicious_keys(inputs: Inputs) -> None:
    """Shared, malformed, and changed since the earlier registry."""
    keys = [row.public_key for row in inputs.servers.collect()]
    assert len(keys) - len(set(keys)) == 2
    assert "not-a-key" in keys
    assert inputs.earlier_servers is not None
    earlier = inputs.earlier_servers.select("url", F.col("public_key").alias("earlier_key"))
    changed = inputs.servers.join(earlier, "url").where(F.col("public_key") != F.col("earlier_key"))
    assert sorted(row.url for row in changed.collect()) == ["https://s000019.example", "https://s000023.example"]


@pytest.mark.parametrize(
    "wrong", [{"attempts": -1}, {"servers": 0}, {"days": 0}, {"hot_share": 1.5}], ids=lambda wrong: next(iter(wrong))
)
def test_a_history_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    """Before Spark is started."""
    with pytest.raises(ValueError, match="must not be negative"):
        History(**{"attempts": 1, "servers": 1, "days": 1, "until": date(2025, 3, 10), **wrong})
