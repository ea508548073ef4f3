"""A run from exports to report: read, compute, write, publish, report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from sqlalchemy.exc import SQLAlchemyError

from federation.analytics.data.computed import Computed, computed_days, note_computed
from federation.analytics.data.export import exported_days
from federation.analytics.data.inputs import attempts_size, read_exports
from federation.analytics.data.publish import Published, publish
from federation.analytics.data.results import (
    KEY_ANOMALIES,
    SERVER_DAILY,
    SERVER_SCORECARD,
    is_stored,
    read_dated,
    read_days,
    stored_dates,
)
from federation.analytics.data.sinks import write_outputs
from federation.analytics.data.snapshots import Place, commit
from federation.analytics.days import MONTH
from federation.analytics.errors import AnalyticsError, first_cause
from federation.analytics.figures.compute import compute
from federation.analytics.frames import Inputs, Window
from federation.analytics.jvm import size_of
from federation.analytics.report.find import find
from federation.analytics.report.page import render, write_page
from federation.analytics.report.summary import summary_of, write_summary
from federation.analytics.session import divide_work, keeping

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCORED: Final = timedelta(days=MONTH)
"""How far back scorecards look."""

_FEW_BYTES: Final = 16 * 2**20
"""Of a registry in a file; it has some 50 000 servers."""

Told = Callable[[str], None]


def window_of(exports: Place, since: date | None, until: date | None) -> Window:
    """Return the days of a run: by default the last 30 that have been exported.

    Raises:
        AnalyticsError: no day is left between the two.
    """
    days = exported_days(exports)
    tomorrow = datetime.now(UTC).date() + timedelta(days=1)
    end = until or (max(days) + timedelta(days=1) if days else tomorrow)
    start = since or max([end - SCORED, *days[:1]])
    if start >= end:
        first = f"; the first exported day is {days[0]}" if days and since is None else ""
        raise AnalyticsError(f"there is no day from {start} up to, not including, {end}{first}")
    return Window(since=start, until=end)


def work_of(exports: Place, since: date | None, until: date | None) -> int:
    """Return how many bytes of attempts a run of these days reads of what has been exported so far."""
    days = [day for day in exported_days(exports) if (since or day) <= day and (until is None or day < until)]
    return attempts_size(exports, days if since else days[-MONTH:])


def run(
    spark: SparkSession,
    exports: Place,
    out: Place,
    window: Window,
    *,
    database: str | None = None,
    now: datetime | None = None,
    read_at: datetime | None = None,
    purged: Iterable[date] = (),
    told: Told = lambda _: None,
) -> dict[str, object]:
    """Compute the results of `window`, and write them to `out` with a report and a summary, which is returned.

    Scorecards are published to `database`. `read_at` is when the database began to be read, if this run did so: by it
    the nightly run knows which days are computed for good. Of the days `purged` the database lacked attempts. Days
    before the window that scorecards look back at, and anomalies that stand, come from the results in `out`.

    Raises:
        AnalyticsError, OSError: an input or the disk failed; every day in `out` is whole. In a store, all is as it was,
            unless publishing failed, which comes last.
    """
    with _explained():
        told(f"reading exports from {window.since} to {window.as_of}")
        inputs = with_stored_days(spark, read_exports(spark, exports, window), out, window)
        size = attempts_size(exports, window.days)
        write_results(inputs, out, window, size=size, now=now, told=told)
    computed = computed_days(out)
    if read_at is not None:
        computed = computed.noting(window, read_at, purged=purged)
    summary = report(spark, out, window.as_of, computed=computed, told=told)
    commit(out)
    if database is not None:
        with _explained():
            told("publishing to the database")
            told(_counted(_publish(spark, out, window.as_of, database, now)))
    if read_at is not None and isinstance(out, Path):  # the node's own nightly run has a directory
        note_computed(out, computed)
    return summary


def write_results(
    inputs: Inputs,
    out: Place,
    window: Window,
    *,
    size: int | None = None,
    now: datetime | None = None,
    told: Told = lambda _: None,
) -> None:
    """Compute the results of `window`, each frame once, and write them to `out`.

    `size` is how many bytes of attempts are read, by default what Spark expects, which it cannot know of a store.

    The largest frame that is kept meanwhile counts attempts by server, day and result, and deliveries also by how many
    milliseconds they took.
    """
    divide_work(inputs.attempts, size)
    told("planning")
    with keeping(few_servers=size_of(inputs.servers) <= _FEW_BYTES) as keep:
        write_outputs(compute(inputs, window=window, now=now, keep=keep), out, window, told=told)


def _publish(spark: SparkSession, out: Place, as_of: date, database: str, now: datetime | None) -> Published:
    try:
        return publish(spark, out, as_of, database_url=database, now=now)
    except SQLAlchemyError as error:
        raise AnalyticsError(
            f"the results are in {out}, but publishing them failed: {first_cause(error)}; run again when the database"
            " is there"
        ) from error


def _counted(published: Published) -> str:
    if published.newer is not None:
        return f"the database has results of {published.newer} already and keeps them"
    counts = f"{published.scorecards:,} scorecards and {published.relay_candidates:,} relay candidates"
    return f"published {counts}, {published.removed:,} rows of servers that vanished removed"


def with_stored_days(spark: SparkSession, inputs: Inputs, out: Place, window: Window) -> Inputs:
    """Return the inputs, together with the daily rows in `out` of days before the window, and the last anomalies."""
    back = (window.since - window.until + SCORED).days
    earlier = (window.since - timedelta(days=number) for number in range(back, 0, -1))
    stored = [day for day in earlier if is_stored(out, SERVER_DAILY, day)]
    if stored:
        inputs = replace(inputs, server_daily=read_days(spark, out, SERVER_DAILY, stored))
    before = (window.as_of - timedelta(days=number) for number in range(1, MONTH))
    known = next((day for day in before if is_stored(out, KEY_ANOMALIES, day)), None)
    if known is not None:
        inputs = replace(inputs, earlier_anomalies=read_dated(spark, out, KEY_ANOMALIES, known))
    return inputs


def report(
    spark: SparkSession,
    out: Place,
    as_of: date | None,
    *,
    computed: Computed | None = None,
    told: Told = lambda _: None,
) -> dict[str, object]:
    """Write `out`/report.html and `out`/summary.json from what `out` holds as of `as_of`, by default the latest run's.

    `computed` is by default what `out` notes. In a store it is for the caller to commit them.

    Raises:
        AnalyticsError, OSError: there are no results of that day.
    """
    with _explained():
        told("writing the report")
        findings = find(spark, out, as_of or latest(out), computed or computed_days(out))
        write_page(render(findings, made_at=datetime.now(UTC)), out)
        summary = summary_of(findings)
        write_summary(summary, out)
    return summary


def has_results(out: Place) -> bool:
    """Tell whether there is a report to write of what lies in `out`."""
    return bool(_results(out))


def _results(out: Place) -> list[str]:
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).date().isoformat()
    found = stored_dates(out, SERVER_SCORECARD)
    return [day for day in found if day <= tomorrow]  # a later one was asked for by mistake


def latest(out: Place) -> date:
    """Return the day of which `out` has its latest results.

    Raises:
        AnalyticsError: it has none.
    """
    days = _results(out)
    if not days:
        raise AnalyticsError(f"there are no results in {out}; `federation analytics run` makes them")
    return date.fromisoformat(days[-1])


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        raise AnalyticsError(f"Spark failed: {first_cause(error)}") from error
