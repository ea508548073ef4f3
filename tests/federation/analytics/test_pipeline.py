"""From a database to the report: the same twice, and the same a day at a time."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pyarrow.parquet
import pytest
from pyspark.sql import SparkSession
from sqlalchemy import create_engine, text

from db.url import parse_url
from federation.analytics import pipeline
from federation.analytics.errors import AnalyticsError
from federation.analytics.export import export
from federation.analytics.frames import Window
from federation.analytics.results import DAILY, DATED
from federation.analytics.source import SourceTables
from tests.federation.analytics.history import DAY, attempt, attempts, fill, moment

NOW = moment(3, 1)
WINDOW = Window(since=DAY, until=DAY + timedelta(days=3))


ROWS = [
    *(
        {**row, "outcome": "retryable", "error_code": "TIMEOUT", "http_status": None} if row["id"] % 7 == 0 else row
        for row in attempts(30, 3)
    ),
    attempt(500, moment(1), duration_ms=-5),
]
"""Three days of attempts, some failed and one impossible."""


def exported(spark: SparkSession, database_url: str, directory: Path) -> Path:
    fill(database_url, ROWS)
    export(SourceTables(spark=spark, url=database_url), directory, now=NOW, until=WINDOW.until)
    return directory


def contents(out: Path) -> dict[str, list[object]]:
    """Every result's rows by file, in their order."""
    return {
        f"{result.name}/{file.parent.name}": pyarrow.parquet.ParquetFile(file).read().to_pylist()
        for result in (*DAILY, *DATED)
        for file in sorted((out / result.name).glob("*/*.parquet"))
    }


def counts(summary: dict[str, object]) -> tuple[int, int, int]:
    """Attempts, deliveries and rows set aside."""
    totals, quarantine = summary["totals"], summary["quarantine"]
    assert isinstance(totals, dict)
    assert isinstance(quarantine, dict)
    return totals["attempts"], totals["delivered"], quarantine["rows"]


def test_a_database_gets_its_scorecards(spark: SparkSession, database_url: str, tmp_path: Path) -> None:
    """From its own tables, on both kinds: two for each server; every attempt is counted or set aside."""
    exports, out = exported(spark, database_url, tmp_path / "exports"), tmp_path / "out"
    summary = pipeline.run(spark, exports, out, WINDOW, database=database_url, now=NOW)
    assert counts(summary) == (90, 78, 1)
    assert summary == json.loads((out / "summary.json").read_text())
    assert pipeline.report(spark, out, None) == summary
    engine = create_engine(parse_url(database_url))
    with engine.connect() as connection:
        published = connection.execute(text("SELECT count(*), count(DISTINCT server_url) FROM server_scorecards")).one()
    engine.dispose()
    assert tuple(published) == (6, 3)


def test_a_day_at_a_time_ends_the_same(spark: SparkSession, sqlite_only: str, tmp_path: Path) -> None:
    """As one run over all days; and running the last day once more changes no row."""
    exports, whole, daily = exported(spark, sqlite_only, tmp_path / "exports"), tmp_path / "whole", tmp_path / "daily"
    pipeline.run(spark, exports, whole, WINDOW, now=NOW)
    expected = contents(whole)
    last = Window(since=WINDOW.as_of, until=WINDOW.until)
    pipeline.run(spark, exports, daily, Window(since=WINDOW.since, until=last.since), now=NOW)
    summary = pipeline.run(spark, exports, daily, last, now=NOW)
    found = contents(daily)
    same = [
        *(f"{result.name}/day={day}" for result in DAILY for day in WINDOW.days),
        *(f"{name}/as_of={WINDOW.as_of}" for name in ("server_scorecard", "relay_candidates")),
    ]
    assert {name: found[name] for name in same} == {name: expected[name] for name in same}
    assert pipeline.run(spark, exports, daily, last, now=NOW) == summary
    assert contents(daily) == found


def test_the_window_is_by_default_what_was_exported(tmp_path: Path) -> None:
    """At most the last 30 days of it; a window of no day is refused."""
    for day in range(40):
        (tmp_path / "attempts" / f"day={DAY + timedelta(days=day)}").mkdir(parents=True)
    end = DAY + timedelta(days=40)
    assert pipeline.window_of(tmp_path, None, None) == Window(since=end - timedelta(days=30), until=end)
    early = DAY + timedelta(days=2)
    assert pipeline.window_of(tmp_path, None, early) == Window(since=DAY, until=early)
    with pytest.raises(AnalyticsError, match="the first exported day is 2025-03-01"):
        pipeline.window_of(tmp_path, None, DAY)


def test_a_report_of_nothing_is_told(spark: SparkSession, tmp_path: Path) -> None:
    """With what makes results."""
    with pytest.raises(AnalyticsError, match=r"there are no results in .*`federation analytics run`"):
        pipeline.report(spark, tmp_path, None)


def test_an_empty_database_has_an_empty_report(spark: SparkSession, sqlite_only: str, tmp_path: Path) -> None:
    """It says that there was nothing, and is no error."""
    done = export(SourceTables(spark=spark, url=sqlite_only), tmp_path / "exports", now=NOW)
    summary = pipeline.run(spark, tmp_path / "exports", tmp_path / "out", done.window, now=NOW)
    assert counts(summary) == (0, 0, 0)
    assert (tmp_path / "out" / "report.html").exists()
