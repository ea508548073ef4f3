"""The application's tables as Parquet: attempts once, by UTC day; the other tables as they are, whole.

    DIR/attempts/day=2025-01-31/*.parquet          replaced whole by every export that covers the day
    DIR/attempts/day=__HIVE_DEFAULT_PARTITION__/   attempts with an impossible time, read with every window
    DIR/servers/, DIR/blacklist/, DIR/health_events/, DIR/links/
    DIR/earlier_servers/                           the registry as the last export of an earlier day found it

A run that fails or is killed leaves every day whole, the old one or the fresh one. Days are put in place oldest first,
so an export that goes on from the latest day leaves no gap. A day never shrinks: if the database has fewer attempts
than were exported, it has purged them, and the export is kept.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Final, Protocol

import pyarrow.parquet
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program gives it
from sqlalchemy.exc import SQLAlchemyError

from federation.analytics.data.database import FIRST_DAY, has_attempts, oldest_attempt
from federation.analytics.data.directories import replace_directory, staging_in
from federation.analytics.data.results import local
from federation.analytics.days import midnight, utc_day
from federation.analytics.errors import AnalyticsError, first_cause
from federation.analytics.frames import Window

ATTEMPTS: Final = "attempts"
SNAPSHOTS: Final = {
    "servers": "server_registry",
    "blacklist": "blacklisted_servers",
    "health_events": "server_health_events",
    "links": "server_links",
}
EARLIER_SERVERS: Final = "earlier_servers"
UNDATED: Final = "day=__HIVE_DEFAULT_PARTITION__"

AGAIN: Final = timedelta(days=1)
"""How far before the latest exported day an export begins by default: that day was perhaps not over, and attempts that
began on the day before were logged after it."""

_FUTURE: Final = timedelta(days=1)
"""Attempts are dated by our own clocks; if one lies this far after the window's end, its time is wrong."""

_EXPORTED_ON: Final = "_exported_on"


class Tables(Protocol):
    """The tables of one database."""

    @property
    def url(self) -> str: ...

    def read(self, table: str, *, since: datetime | None = None, until: datetime | None = None) -> DataFrame:
        """Return the rows from `since` up to, not including, `until`, as a frame of the table's schema in `frames`."""
        ...

    def snapshot(self, table: str, target: Path) -> None:
        """Write the whole table, one of those that stay small, as Parquet files to the directory `target`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What lies in the directory after an export; `attempts` counts them by day, for days in `window` with any."""

    window: Window
    attempts: dict[date, int]
    kept: tuple[date, ...]
    """Days whose export was kept, because the database has fewer attempts of them."""
    undated: int
    snapshots: dict[str, int]


def export(
    tables: Tables,
    directory: Path,
    *,
    since: date | None = None,
    until: date | None = None,
    now: datetime | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> Export:
    """Export what the database holds now, for the UTC days `since` to `until`, to `directory`.

    `since` is by default the day before the latest exported one, or the first with attempts; `until`, which is not
    included, is tomorrow by default. Repeating it changes nothing unless the database changed.

    Raises:
        AnalyticsError: the database or the directory failed; every day is whole.
    """
    today = (now or datetime.now(UTC)).astimezone(UTC).date()
    with staging_in(directory) as staging:
        window = _window(tables.url, directory, since, until, today)
        try:
            told(f"reading attempts from {window.since} to {window.as_of}")
            fresh = _stage_attempts(tables, staging / ATTEMPTS, window, today)
            for name, table in SNAPSHOTS.items():
                told(f"reading {name}")
                tables.snapshot(table, staging / name)
        except (PySparkException, Py4JJavaError, SQLAlchemyError) as error:
            raise AnalyticsError(f"the export failed, all exports stay as they were: {first_cause(error)}") from error
        told("putting the exports in place")
        _rotate_servers(directory, staging, today)
        for name in SNAPSHOTS:
            replace_directory(staging / name, directory / name)
        return _place_attempts(fresh, directory, window)


def exported_days(directory: Path) -> list[date]:
    """Return the days that have been exported, in order."""
    days = []
    for path in (directory / ATTEMPTS).glob("day=????-??-??"):
        try:
            days.append(date.fromisoformat(path.name.removeprefix("day=")))
        except ValueError:
            continue  # somebody else's
    return sorted(days)


def _window(url: str, directory: Path, since: date | None, until: date | None, today: date) -> Window:
    end = until or today + timedelta(days=1)
    if since is None:
        earlier = exported_days(directory)
        since = earlier[-1] - AGAIN if earlier else oldest_attempt(url)
    if since is None or (until is None and since >= end):
        since = end - timedelta(days=1)
    return Window(since=since, until=end)


def _stage_attempts(tables: Tables, staging: Path, window: Window, today: date) -> Path:
    """Write all days in one pass, each to a directory of its own."""
    impossible = max(window.until, today + timedelta(days=1)) + _FUTURE
    ranges = ((window.since, window.until), (None, FIRST_DAY), (impossible, None))
    frames = [_dated(tables, since, until) for since, until in ranges if has_attempts(tables.url, since, until)]
    if frames:
        functools.reduce(DataFrame.union, frames).write.partitionBy("day").parquet(local(staging))
    return staging


def _dated(tables: Tables, since: date | None, until: date | None) -> DataFrame:
    """Return the attempts with the `day` of each, which is null where the time is impossible."""
    frame = tables.read("delivery_attempts", since=_midnight(since), until=_midnight(until))
    return frame.withColumn("day", utc_day("started_at") if since and until else F.lit(None).cast("date"))


def _rotate_servers(directory: Path, staging: Path, today: date) -> None:
    """Keep the registry that was exported on an earlier day as the earlier one.

    A second export on one day does not change it. The copy is in place before the registry is replaced, so a run killed
    in between rotates the same one again.
    """
    (staging / "servers" / _EXPORTED_ON).write_text(today.isoformat())
    current = directory / "servers"
    if not current.exists():
        return
    marker = current / _EXPORTED_ON
    if marker.exists() and marker.read_text() >= today.isoformat():
        return
    copy = staging / EARLIER_SERVERS
    shutil.copytree(current, copy)
    replace_directory(copy, directory / EARLIER_SERVERS)


def _place_attempts(fresh: Path, directory: Path, window: Window) -> Export:
    counts: dict[date, int] = {}
    kept = []
    for day in window.days:
        name = f"day={day.isoformat()}"
        count, before = count_rows(fresh / name), count_rows(directory / ATTEMPTS / name)
        if count < before:
            kept.append(day)
        elif count:
            replace_directory(fresh / name, directory / ATTEMPTS / name)
        if count or before:
            counts[day] = max(count, before)
    undated = count_rows(fresh / UNDATED)
    if undated:
        replace_directory(fresh / UNDATED, directory / ATTEMPTS / UNDATED)
    else:
        shutil.rmtree(directory / ATTEMPTS / UNDATED, ignore_errors=True)
    snapshots = {name: count_rows(directory / name) for name in SNAPSHOTS}
    return Export(window=window, attempts=counts, kept=tuple(kept), undated=undated, snapshots=snapshots)


def count_rows(directory: Path) -> int:
    """Count the rows by the files' footers.

    A file without one, which somebody else's killed run left, counts as empty.
    """
    total = 0
    for file in sorted(directory.glob("*.parquet")):
        try:
            total += pyarrow.parquet.read_metadata(file).num_rows
        except pyarrow.ArrowException:
            continue
    return total


def _midnight(day: date | None) -> datetime | None:
    return None if day is None else midnight(day)
