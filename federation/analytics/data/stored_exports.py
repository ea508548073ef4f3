"""Exports to a store: as those to a directory, but written by the executors alone, and visible all at once.

`attempts/day=2025-01-31`, `attempts/day=unknown`, `servers`, `earlier_servers` … are partitions: see `snapshots`.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as sf
from sqlalchemy.exc import SQLAlchemyError

from federation.analytics import frames
from federation.analytics.data.export import (
    ATTEMPTS,
    EARLIER_SERVERS,
    SNAPSHOTS,
    STORED_UNDATED,
    Export,
    attempts_of,
    exported_days,
    outdated_days,
    window_of_export,
)
from federation.analytics.errors import AnalyticsError, first_cause

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import SparkSession

    from federation.analytics.data.snapshots import Snapshot
    from federation.analytics.data.source import SourceTables
    from federation.analytics.data.stored_files import DataFile
    from federation.analytics.frames import Window

    Written = Mapping[str, tuple[DataFile, ...]]

_UNDATED: Final = f"{ATTEMPTS}/{STORED_UNDATED}"


def export_to_store(
    tables: SourceTables,
    spark: SparkSession,
    exports: Snapshot,
    *,
    since: date | None = None,
    until: date | None = None,
    keep_days: int | None = None,
    now: datetime | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> Export:
    """Export what the database holds now, as `export` does, and commit it.

    Raises:
        AnalyticsError: the database or the store failed, or another export was quicker; all exports stay as they were.
    """
    today = (now or datetime.now(UTC)).astimezone(UTC).date()
    window = window_of_export(tables.url, exports, since, until, today)
    try:
        told(f"reading attempts from {window.since} to {window.as_of}")
        rows = attempts_of(tables, window, today)
        fresh = {} if rows is None else exports.write(rows, ATTEMPTS, "day")
        done = _place_attempts(fresh, spark, exports, window)
        for name, table in SNAPSHOTS.items():
            told(f"reading {name}")
            written = exports.write(tables.read(table), name)
            if name == "servers":
                _rotate_servers(exports, today)
            exports.place({name: written.get(name, ())})
    except (PySparkException, Py4JJavaError, SQLAlchemyError) as error:
        raise AnalyticsError(f"the export failed, all exports stay as they were: {first_cause(error)}") from error
    removed = outdated_days(exports.partitions(ATTEMPTS), today, keep_days)
    exports.remove(_day(day) for day in removed)
    told("committing the exports")
    exports.commit()
    snapshots = {name: exports.rows(name) for name in SNAPSHOTS}
    return replace(done, removed=removed, undated=exports.rows(_UNDATED), snapshots=snapshots)


def _place_attempts(fresh: Written, spark: SparkSession, exports: Snapshot, window: Window) -> Export:
    """Have each day hold what was read of it, and what the database has purged of it since it was exported."""
    counts: dict[date, int] = {}
    kept = []
    exported = exported_days(exports)
    filled = [day for day in window.days if exported and day not in exported and day < exported[-1]]
    latest = max([*exported, *(day for day in window.days if _day(day) in fresh)], default=None)
    for day in window.days:
        place = _day(day)
        lost: Sequence[DataFile] = exports.files(place)
        if place in fresh:
            lost = _lost(fresh[place], spark, exports, place) if lost else ()
        if lost:
            kept.append(day)
        if place in fresh or (latest is not None and day < latest):
            exports.place({place: (*fresh.get(place, ()), *lost)})
        if rows := exports.rows(place):
            counts[day] = rows
    exports.place({_UNDATED: fresh.get(_UNDATED, ())})
    return Export(
        window=window, attempts=counts, kept=tuple(kept), filled=tuple(filled), removed=(), undated=0, snapshots={}
    )


def _lost(fresh: Sequence[DataFile], spark: SparkSession, exports: Snapshot, place: str) -> tuple[DataFile, ...]:
    """Write what was exported of a day before, and the database has no more.

    Attempts are purged oldest first, and their ids count up: so the first id tells whether any were.
    """
    before = exports.files(place)
    if _rows(fresh) >= _rows(before) and _first_id(fresh) == _first_id(before):
        return ()
    stored, now = (exports.read_files(spark, frames.ATTEMPTS, files) for files in (before, fresh))
    lost = stored.where(sf.col("id").isNotNull()).join(now.select("id"), "id", "left_anti").select(*stored.columns)
    return exports.write(lost, place).get(place, ())


def _rotate_servers(exports: Snapshot, today: date) -> None:
    """Keep the registry that was exported on an earlier day as the earlier one.

    A second export on one day does not change it.
    """
    if exports.has("servers") and (exports.exported_on or "") < today.isoformat():
        exports.place({EARLIER_SERVERS: exports.files("servers")})
    exports.note_exported(today.isoformat())


def _day(day: date) -> str:
    return f"{ATTEMPTS}/day={day.isoformat()}"


def _rows(files: Sequence[DataFile]) -> int:
    return sum(file.rows for file in files)


def _first_id(files: Sequence[DataFile]) -> int | None:
    return min((file.first_id for file in files if file.first_id is not None), default=None)
