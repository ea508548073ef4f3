"""Times and UTC days, independent of the session's time zone."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation gives it

if TYPE_CHECKING:
    from pyspark.sql import Column

    from federation.analytics.frames import Window

DAY: Final = timedelta(days=1)
WEEK: Final = 7
MONTH: Final = 30
"""The windows over which servers are judged, in days."""

FIRST_DAY: Final = date(2000, 1, 1)
"""No attempt was made before this day."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def midnight(day: date) -> datetime:
    """Return the first moment of a UTC day."""
    return datetime.combine(day, time(), UTC)


def instant(microseconds: int) -> datetime:
    """Return the time that many microseconds after 1970. If Spark converted it, it would return local time."""
    return _EPOCH + timedelta(microseconds=microseconds)


def end_of(window: Window, *, now: datetime) -> datetime:
    """Return when the window ends, or `now` if that is earlier: no server has been down tomorrow."""
    return min(midnight(window.until), now)


def is_within(column: str, window: Window) -> Column:
    """Tell whether a time lies in the window.

    These are two comparisons with constants, by which readers of files can prune.
    """
    return (F.col(column) >= F.lit(midnight(window.since))) & (F.col(column) < F.lit(midnight(window.until)))


def utc_day(moment: str | Column) -> Column:
    """Return the UTC day of a time. `to_date` would use the session's time zone."""
    seconds = F.unix_seconds(F.col(moment) if isinstance(moment, str) else moment)
    return F.date_from_unix_date(F.floor(seconds / DAY.total_seconds()).cast("int"))


def start_of(day: str) -> Column:
    """Return the first moment of a UTC day in a column."""
    return F.timestamp_seconds(F.unix_date(F.col(day)).cast("long") * int(DAY.total_seconds()))


def seconds_between(begin: Column, end: Column) -> Column:
    """Return the seconds from `begin` to `end`, negative if `end` is earlier."""
    return microseconds_between(begin, end) / 1_000_000


def microseconds_between(begin: Column, end: Column) -> Column:
    """Return the whole microseconds from `begin` to `end`, negative if `end` is earlier."""
    return F.unix_micros(end) - F.unix_micros(begin)
