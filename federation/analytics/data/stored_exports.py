"""Exports to a store: as those to a directory, but written by the executors alone, and visible all at once.

`attempts/day=2025-01-31`, `attempts/day=unknown`, `servers`, `earlier_servers` … are partitions: see `snapshots`.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
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
    lost_of,
    outdated_days,
    place_days,
    rows_in,
    window_of_export,
)
from federation.analytics.errors import AnalyticsError, first_cause

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
    held = {day: (fresh.get(place, ()), exports.files(place)) for day in window.days if (place := _day(day))}
    lost: dict[date, tuple[DataFile, ...]] = {}

    def keep_lost(day: date) -> int:
        now, before = (exports.read_files(spark, frames.ATTEMPTS, files) for files in held[day])
        lost[day] = exports.write(lost_of(before, now), _day(day)).get(_day(day), ())
        return rows_in(lost[day])

    def put(day: date) -> None:
        exports.place({_day(day): (*held[day][0], *lost.get(day, ()))})

    done = place_days(window, exported_days(exports), held, keep_lost, put)
    exports.place({_UNDATED: fresh.get(_UNDATED, ())})
    return done


def _rotate_servers(exports: Snapshot, today: date) -> None:
    """Keep the registry that was exported on an earlier day as the earlier one.

    A second export on one day does not change it.
    """
    if exports.has("servers") and (exports.exported_on or "") < today.isoformat():
        exports.place({EARLIER_SERVERS: exports.files("servers")})
    exports.note_exported(today.isoformat())


def _day(day: date) -> str:
    return f"{ATTEMPTS}/day={day.isoformat()}"
