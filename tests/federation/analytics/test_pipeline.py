"""From a database to the report: the same twice, and the same a day at a time."""

from __future__ import annotations

import json
import shutil
from datetime import timedelta
from pathlib import Path

import pyarrow.parquet
import pytest
from pyspark.sql import SparkSession
from sqlalchemy import create_engine, text

from db.url import parse_url
from federation.analytics import pipeline
from federation.analytics.data.export import export
from federation.analytics.data.results import DAILY, DATED, KEY_ANOMALIES, NETWORK_SUMMARY, SERVER_DAILY
from federation.analytics.data.snapshots import Snapshot
from federation.analytics.data.source import SourceTables
from federation.analytics.errors import AnalyticsError
from federation.analytics.frames import Window
from tests.federation.analytics.history import DAY, THREE_DAYS, fill, moment
from tests.federation.analytics.script_run import ScriptRun
from tests.servers import free_port

NOW = moment(3, 1)
WINDOW = Window(since=DAY, until=DAY + timedelta(days=3))

NOT_OURS = (
    *("incubator modules", "requires more resource than any of Workers", "has not accepted any resources"),
    "use of fork() may lead to deadlocks",
)
"""What Java says at its start, a cluster whose worker is not there yet, or slow to come, and Python, from 3.12 on, of a
process of Spark's that forks beside threads."""


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


def published(url: str) -> tuple[int, ...]:
    """Scorecards in the database, and the servers they are of."""
    engine = create_engine(parse_url(url))
    with engine.connect() as connection:
        row = connection.execute(text("SELECT count(*), count(DISTINCT server_url) FROM server_scorecards")).one()
    engine.dispose()
    return tuple(row)


@pytest.mark.usefixtures("s3_credentials")
def test_a_run_goes_on_and_another_database_gives_the_same(
    spark: SparkSession, script: ScriptRun, postgres_only: str, tmp_path: Path, full: bool
) -> None:
    """The last day alone, with what is stored of those before, makes what a run over all makes, whatever lay there.

    That is the script's, in a process and a directory of its own: JSON on stdout, a report, and nothing of ours on
    stderr. It reads SQLite, the other PostgreSQL; each publishes to its own, two scorecards for each server.
    With `--full` an executor, in another directory still, exports to a store what one machine does: it is handed the
    code for it.
    """
    fill(postgres_only, THREE_DAYS)
    whole, daily, exports = script.directory / "out", tmp_path / "daily", tmp_path / "exports"
    days = export(SourceTables(spark=spark, url=postgres_only), exports).attempts
    status, stdout, stderr = script.end()
    assert status == 0, stderr
    assert [line for line in stderr.splitlines() if not any(known in line for known in NOT_OURS)] == []
    summary, end = json.JSONDecoder().raw_decode(stdout)
    assert summary == json.loads((whole / "summary.json").read_text())
    assert (summary["as_of"], counts(summary), published(script.database)) == ("2025-03-03", (90, 78, 1), (6, 3))
    assert (whole / "report.html").stat().st_size > 1000
    expected = contents(whole)
    assert (script.exports is not None) == full
    if script.exports:
        assert json.loads(stdout[end:])["attempts"] == {f"{day}": count for day, count in days.items()}
        stored = Snapshot(script.exports)
        assert {day: stored.rows(f"attempts/day={day}") for day in days} == days
        assert [path.parent.name for path in (script.directory / "spark" / "work").glob("app-*/*/stderr")] == ["0"]

    shutil.copytree(whole, daily)
    shutil.rmtree(daily / KEY_ANOMALIES.name)
    shutil.copyfile(SERVER_DAILY.file(daily, DAY), SERVER_DAILY.file(daily, WINDOW.as_of))
    shutil.copyfile(NETWORK_SUMMARY.file(daily, DAY), NETWORK_SUMMARY.file(daily, WINDOW.as_of))
    last = Window(since=WINDOW.as_of, until=WINDOW.until)
    again = pipeline.run(spark, exports, daily, last, database=postgres_only)
    assert contents(daily) == expected
    assert (counts(again), published(postgres_only)) == ((90, 78, 1), (6, 3))


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


def test_the_work_is_the_bytes_of_attempts_to_be_read(tmp_path: Path) -> None:
    """Of the days that are asked for, by default the last 30; before the first export there are none."""
    assert pipeline.work_of(tmp_path, None, None) == 0
    for number in range(40):
        day = tmp_path / "attempts" / f"day={DAY + timedelta(days=number)}"
        day.mkdir(parents=True)
        (day / "part.parquet").write_bytes(bytes(number))
    last = DAY + timedelta(days=39)
    assert pipeline.work_of(tmp_path, None, None) == sum(range(10, 40))
    assert pipeline.work_of(tmp_path, last, None) == 39
    assert pipeline.work_of(tmp_path, DAY, DAY + timedelta(days=3)) == 0 + 1 + 2


def test_a_report_of_nothing_is_told(spark: SparkSession, tmp_path: Path) -> None:
    """With what makes results."""
    with pytest.raises(AnalyticsError, match=r"there are no results in .*`federation analytics run`"):
        pipeline.report(spark, tmp_path, None)


def test_a_database_that_is_gone_when_results_are_published_is_told(
    spark: SparkSession, sqlite_only: str, tmp_path: Path
) -> None:
    """The results are there and make a report; of an empty database it says that there was nothing, and is no error."""
    exports, out = tmp_path / "exports", tmp_path / "out"
    done = export(SourceTables(spark=spark, url=sqlite_only), exports, now=NOW)
    gone = f"postgresql://u:s3cret@127.0.0.1:{free_port()}/app"
    with pytest.raises(
        AnalyticsError, match=f"the results are in {out}, but publishing them failed.*run again"
    ) as error:
        pipeline.run(spark, exports, out, done.window, database=gone, now=NOW)
    assert "s3cret" not in str(error.value)
    assert "\n" not in str(error.value)
    assert counts(pipeline.report(spark, out, None)) == (0, 0, 0)
    assert (out / "report.html").exists()
