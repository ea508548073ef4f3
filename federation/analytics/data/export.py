"""The application's tables as Parquet: attempts once, by UTC day; the other tables as they are, whole.

    DIR/attempts/day=2025-01-31/*.parquet          replaced whole by every export that covers the day
    DIR/attempts/day=__HIVE_DEFAULT_PARTITION__/   attempts with an impossible time, read with every window
    DIR/servers/, DIR/blacklist/, DIR/health_events/, DIR/links/, DIR/deliveries/, DIR/losses/, DIR/accepted_keys/
    DIR/earlier_servers/                           the registry as the last export of an earlier day found it

A run that fails or is killed leaves every day whole, the old one or the fresh one. Days are put in place oldest first,
and a day without attempts before the latest has an empty file, so an export finds the days that were left out. A day
never shrinks: what the database has purged since it was exported is kept beside what it has now.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Final

import pyarrow.parquet
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program gives it
from pyspark.sql.pandas.types import to_arrow_schema
from sqlalchemy.exc import SQLAlchemyError

from federation.analytics import frames
from federation.analytics.data.database import has_attempts, oldest_attempt
from federation.analytics.data.directories import replace_directory, staging_in
from federation.analytics.data.results import UNDATED, local, readable
from federation.analytics.data.snapshots import Place, Snapshot
from federation.analytics.data.source import SourceTables
from federation.analytics.data.stored_files import UNKNOWN, DataFile, describe_file
from federation.analytics.days import DAY, FIRST_DAY, midnight, utc_day
from federation.analytics.errors import AnalyticsError, first_cause
from federation.analytics.frames import Window

ATTEMPTS: Final = "attempts"
SNAPSHOTS: Final = {
    "servers": "server_registry",
    "blacklist": "blacklisted_servers",
    "health_events": "server_health_events",
    "links": "server_links",
    "deliveries": "delivery_jobs",
    "losses": "delivery_losses",
    "accepted_keys": "accepted_keys",
}
EARLIER_SERVERS: Final = "earlier_servers"
STORED_UNDATED: Final = f"day={UNKNOWN}"

AGAIN: Final = timedelta(days=1)
"""How far before the latest exported day an export begins by default: that day was perhaps not over, and attempts that
began on the day before were logged after it."""

_FUTURE: Final = timedelta(days=1)
"""Attempts are dated by our own clocks; if one lies this far after the window's end, its time is wrong."""

_EXPORTED_ON: Final = "_exported_on"

FOOTERS_AT_ONCE: Final = 16
"""Read from a mount, each of them is a trip or two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What lies in the directory after an export; `attempts` counts them by day, for days in `window` with any."""

    window: Window
    attempts: dict[date, int]
    kept: tuple[date, ...]
    """Days of which the database lacks attempts that were exported before; these are kept."""
    filled: tuple[date, ...]
    """Days before the latest exported one that were not exported before."""
    removed: tuple[date, ...] = ()
    """Days whose export was older than asked to keep."""
    undated: int = 0
    snapshots: Mapping[str, int] = field(default_factory=dict)


def export(
    tables: SourceTables,
    directory: Path,
    *,
    since: date | None = None,
    until: date | None = None,
    keep_days: int | None = None,
    now: datetime | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> Export:
    """Export what the database holds now, for the UTC days `since` to `until`, to `directory`.

    `since` is by default the day before the latest exported one, the first day that was left out, or the first with
    attempts; `until`, which is not included, is tomorrow by default. Days that ended more than `keep_days` ago are
    removed from `directory`. Repeating it changes nothing unless the database changed.

    Raises:
        AnalyticsError: the database or the directory failed; every day is whole.
    """
    today = (now or datetime.now(UTC)).astimezone(UTC).date()
    with staging_in(directory) as staging:
        window = window_of_export(tables.url, directory, since, until, today)
        try:
            told(f"reading attempts from {window.since} to {window.as_of}")
            _stage_attempts(tables, staging / ATTEMPTS, window, today)
            for name, table in SNAPSHOTS.items():
                told(f"reading {name}")
                tables.read(table).write.parquet(local(staging / name))
        except (PySparkException, Py4JJavaError, SQLAlchemyError) as error:
            raise AnalyticsError(f"the export failed, all exports stay as they were: {first_cause(error)}") from error
        told("putting the exports in place")
        return put_in_place(staging, directory, window, today, keep_days)


def put_in_place(staging: Path, directory: Path, window: Window, today: date, keep_days: int | None) -> Export:
    """Replace exports in `directory` by those in `staging`, one after the other, each of them whole.

    Days come last, oldest first: where one is the fresh one, so are all before it, and the other tables.
    """
    _rotate_servers(directory, staging, today)
    for name in SNAPSHOTS:
        replace_directory(staging / name, directory / name)
    done = _place_attempts(staging / ATTEMPTS, directory, window)
    return replace(done, removed=_remove_old(directory, today, keep_days))


def exported_days(place: Place) -> list[date]:
    """Return the days that have been exported, in order."""
    days = []
    tomorrow = datetime.now(UTC).date() + DAY
    if isinstance(place, Snapshot):
        names = place.partitions(ATTEMPTS)
    else:
        names = [path.name for path in (place / ATTEMPTS).glob("day=????-??-??")]
    for name in names:
        try:
            day = date.fromisoformat(name.removeprefix("day="))
        except ValueError:
            continue  # somebody else's, or of no day
        if day <= tomorrow:  # a later one was asked for by mistake
            days.append(day)
    return sorted(days)


def window_of_export(url: str, place: Place, since: date | None, until: date | None, today: date) -> Window:
    """Return the days of an export: see `export`."""
    end = until or today + timedelta(days=1)
    if since is None:
        earlier = exported_days(place)
        since = min([earlier[-1] - AGAIN, *_left_out(earlier)]) if earlier else oldest_attempt(url)
    if since is None or (until is None and since >= end):
        since = end - timedelta(days=1)
    return Window(since=since, until=end)


def _left_out(exported: Sequence[date]) -> list[date]:
    every = range((exported[-1] - exported[0]).days)
    return sorted({exported[0] + timedelta(days=number) for number in every} - set(exported))


def outdated_days(names: Iterable[str], today: date, keep_days: int | None) -> tuple[date, ...]:
    """Return the days, of those so named, that are too old, or to come: somebody asked for these by mistake."""
    found = []
    for name in sorted(names):
        try:
            age = (today - date.fromisoformat(name.removeprefix("day="))).days
        except ValueError:
            continue
        if age < -1 or (keep_days is not None and age > keep_days):
            found.append(today - timedelta(days=age))
    return tuple(found)


def _remove_old(directory: Path, today: date, keep_days: int | None) -> tuple[date, ...]:
    names = (path.name for path in (directory / ATTEMPTS).glob("day=????-??-??"))
    removed = outdated_days(names, today, keep_days)
    for day in removed:
        shutil.rmtree(directory / ATTEMPTS / f"day={day.isoformat()}")
    return removed


def _stage_attempts(tables: SourceTables, staging: Path, window: Window, today: date) -> None:
    """Write all days in one pass, each to a directory of its own."""
    rows = attempts_of(tables, window, today)
    if rows is not None:
        rows.write.partitionBy("day").parquet(local(staging))


def attempts_of(tables: SourceTables, window: Window, today: date) -> DataFrame | None:
    """Return the attempts of the window and those of impossible times, with the `day` of each; None if there are none.

    The day is null where the time is impossible.
    """
    impossible = max(window.until, today + timedelta(days=1)) + _FUTURE
    ranges = ((window.since, window.until), (None, FIRST_DAY), (impossible, None))
    parts = [_dated(tables, since, until) for since, until in ranges if has_attempts(tables.url, since, until)]
    return functools.reduce(DataFrame.union, parts) if parts else None


def _dated(tables: SourceTables, since: date | None, until: date | None) -> DataFrame:
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
    places = {day: (fresh / name, directory / ATTEMPTS / name) for day in window.days if (name := f"day={day}")}
    with ThreadPoolExecutor(FOOTERS_AT_ONCE) as pool:
        now, before = (pool.map(files_in, [pair[at] for pair in places.values()]) for at in range(2))
        held = dict(zip(places, zip(now, before, strict=True), strict=True))
        tables = dict(zip(SNAPSHOTS, pool.map(lambda name: count_rows(directory / name), SNAPSHOTS), strict=True))

    def put(day: date) -> None:
        found, place = places[day]
        replace_directory(found if rows_in(held[day][0]) else _empty_day(found), place)

    done = place_days(window, exported_days(directory), held, lambda day: _keep_lost(*places[day]), put)
    undated = count_rows(fresh / UNDATED)
    if undated:
        replace_directory(fresh / UNDATED, directory / ATTEMPTS / UNDATED)
    else:
        shutil.rmtree(directory / ATTEMPTS / UNDATED, ignore_errors=True)
    return replace(done, undated=undated, snapshots=tables)


def place_days(
    window: Window,
    exported: Sequence[date],
    held: Mapping[date, tuple[Sequence[DataFile], Sequence[DataFile]]],
    keep_lost: Callable[[date], int],
    put: Callable[[date], None],
) -> Export:
    """Have each day hold what was read of it, and what the database has purged of it since it was exported.

    `held` are the files of each day, the fresh ones and those of before. `keep_lost` adds to the fresh ones what they
    lack, and returns how many rows that are; `put` puts them in place, of a day that was left out an empty one.
    """
    counts: dict[date, int] = {}
    kept = []
    latest = max([*exported, *(day for day, (now, _) in held.items() if rows_in(now))], default=None)
    for day, (now, before) in held.items():
        count = rows_in(now)
        lost = rows_in(before) if not count else keep_lost(day) if lacks_some(now, before) else 0
        if lost:
            kept.append(day)
        if count or (not rows_in(before) and latest is not None and day < latest):
            put(day)
        if count + lost:
            counts[day] = count + lost
    filled = [day for day in window.days if exported and day not in exported and day < exported[-1]]
    return Export(window=window, attempts=counts, kept=tuple(kept), filled=tuple(filled))


def _keep_lost(fresh: Path, exported: Path) -> int:
    """Add to a day of an export what was exported before, and the database has no more. Return how many there are."""
    read = SparkSession.active().read.schema(frames.ATTEMPTS)
    staged = fresh.with_name(f"lost-{fresh.name}")
    lost_of(read.parquet(readable(exported)), read.parquet(readable(fresh))).write.parquet(local(staged))
    rows = count_rows(staged)
    for file in staged.glob("*.parquet") if rows else ():
        file.rename(fresh / f"lost-{file.name}")
    return rows


def lost_of(before: DataFrame, now: DataFrame) -> DataFrame:
    """Return the attempts that were exported before, and the database has no more."""
    return before.where(F.col("id").isNotNull()).join(now.select("id"), "id", "left_anti").select(*before.columns)


def lacks_some(now: Sequence[DataFile], before: Sequence[DataFile]) -> bool:
    """Tell whether attempts that were exported before may be gone.

    They are purged oldest first, and their ids count up: so the first id tells whether any were.
    """
    return bool(before) and (rows_in(now) < rows_in(before) or _first_id(now) != _first_id(before))


def rows_in(files: Iterable[DataFile]) -> int:
    return sum(file.rows for file in files)


def _first_id(files: Iterable[DataFile]) -> int | None:
    return min((file.first_id for file in files if file.first_id is not None), default=None)


def _empty_day(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    nothing = to_arrow_schema(frames.ATTEMPTS).empty_table()
    pyarrow.parquet.write_table(nothing, directory / "part-0.parquet")
    return directory


def count_rows(directory: Path) -> int:
    return rows_in(files_in(directory))


def files_in(directory: Path) -> list[DataFile]:
    """Return the files that have rows, by their footers.

    A file without one, which somebody else's killed run left, counts as empty.
    """
    found = []
    for file in directory.glob("*.parquet"):
        with contextlib.suppress(pyarrow.ArrowException):
            found.append(describe_file(file.name, file.stat().st_size, pyarrow.parquet.read_metadata(file)))
    return [file for file in found if file.rows]


def _midnight(day: date | None) -> datetime | None:
    return None if day is None else midnight(day)
