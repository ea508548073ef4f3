"""Cron patterns, read as Node's `cron-parser` reads them, which BullMQ's own workers use: one meaning on every storage.

Theory of operation. A pattern becomes the set of values of each field. The next occurrence is found day by day, by what
the clocks show on that day. A day without a change of the clocks is plain arithmetic. On any other each minute of the
pattern is looked up, so that it comes once: a minute that the clocks skip comes an hour later, or more where that is
skipped, too; one that they show twice comes the first time. If the pattern has no hours, it goes on through both as
real hours do. Where the clocks change by part of an hour (Lord Howe Island), such a pattern keeps to what they show,
and minutes that are skipped are moved by as much. Where a walk begins makes no difference.

`cron-parser` 4 (BullMQ 5) and 5 (BullMQ 6) agree on what is read here, except that 5 refuses a list that names a value
twice. What they read differently is refused, and so is what is no pattern to 4. In the night of a change they differ
where midnight is skipped or comes twice, where the clocks change by part of an hour or by two hours (Troll), and where
they change within an hour (Chatham); then what runs once counts here.

Croniter, which the `bullmq` package uses, is no help: it reads a quarter of the patterns of the test differently, and
is an hour off when the clocks change before the next occurrence.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from functools import cache, lru_cache
from pathlib import Path
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from workers.errors import StorageError

LONGEST_PATTERN: Final = 1_024
"""In characters; `cron-parser` 5 refuses longer ones."""
HOUR: Final = 3_600
YEARS_AHEAD: Final = 30
"""How far to look for an occurrence. `cron-parser` 4 gives up after about 27 years."""

MACROS: Final = {
    "@yearly": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@hourly": "0 * * * *",
}
ANY: Final = ("*", "?")
MISSING_FIELDS: Final = ("0", "*", "*", "*", "*", "*")

_MONTHS: Final = ("", "jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAYS: Final = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_LONGEST_MONTHS: Final = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)

# Not `right/...` and its like, which are files beside the zones and no zones to Node.
_ZONE: Final = re.compile(r"(?!right/|posix|local)[A-Za-z]\w*(?:[/+-]\w+)*", re.ASCII)
_NAME: Final = re.compile(r"[A-Za-z]{3}")
_RANGE: Final = re.compile(
    r"(?:(?P<every>\*)|(?P<first>\d{1,2})(?:-(?P<last>\d{1,2}))?)(?:/(?P<step>\d{1,3}))?", re.ASCII
)
_LAST_WEEKDAY: Final = re.compile(r"[0-7]L", re.ASCII)
_NTH_WEEKDAY: Final = re.compile(r"([0-7])#([1-5])", re.ASCII)


class UnreadablePattern(StorageError):
    """A cron pattern that Node may read otherwise than we do, or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CronPattern:
    """When something recurs, in a time zone that is given apart.

    `days` is None if every day of the month will do; `weekdays` and `last_weekdays` (the last Friday of a month) count
    from Sunday, 0, and are both empty if every day of the week will do. `nth` limits `weekdays` to the first ... fifth
    of the month, unless it is 0. Of days of the month and of the week, either is enough.
    """

    seconds: Sequence[int]
    minutes: Sequence[int]
    hours: Sequence[int]
    days: frozenset[int] | None
    last_day: bool
    months: frozenset[int]
    weekdays: frozenset[int]
    last_weekdays: frozenset[int]
    nth: int

    def next_after(self, at_ms: int, zone: tzinfo) -> int | None:
        """Return the first occurrence after `at_ms`, in milliseconds since 1970; None if there is none for decades.

        Raises:
            UnreadablePattern: the time is beyond the calendar.
        """
        try:
            return self._next_after(at_ms // 1_000, zone)
        except (ValueError, OverflowError, OSError) as error:
            raise UnreadablePattern(f"there is no calendar for {at_ms} ms after 1970") from error

    def _next_after(self, start: int, zone: tzinfo) -> int | None:
        found: int | None = None
        for day in self._days_from(datetime.fromtimestamp(start, zone).date() - timedelta(days=1)):
            midnight = datetime(day.year, day.month, day.day, tzinfo=zone)
            # What the clocks skip at the end of a day comes in the next one, which may have something earlier.
            if found is not None and found < min(midnight.timestamp(), midnight.replace(fold=1).timestamp()):
                break
            ahead = self._first_of_day(midnight, start, zone)
            found = min((each for each in (found, ahead) if each is not None), default=None)
        return None if found is None else found * 1_000

    def _days_from(self, day: date) -> Iterator[date]:
        last_year = day.year + YEARS_AHEAD
        while day.year <= last_year:
            if day.month not in self.months:
                day = date(day.year + day.month // 12, day.month % 12 + 1, 1)
                continue
            if self._is_day(day):
                yield day
            day += timedelta(days=1)

    def _is_day(self, day: date) -> bool:
        weekly = self.weekdays or self.last_weekdays
        if self.days is None:
            return not weekly or self._is_weekday(day)
        last = self.last_day and (day + timedelta(days=1)).day == 1
        return last or day.day in self.days or (bool(weekly) and self._is_weekday(day))

    def _is_weekday(self, day: date) -> bool:
        weekday = day.isoweekday() % 7
        if weekday in self.last_weekdays and (day + timedelta(days=7)).month != day.month:
            return True
        return weekday in self.weekdays and self.nth in (0, (day.day + 6) // 7)

    def _first_of_day(self, midnight: datetime, start: int, zone: tzinfo) -> int | None:
        """Return the first occurrence after `start` of those that belong to the day."""
        if _clocks_change(midnight):
            minutes = _minutes_of(midnight.date(), zone, tuple(self.hours), tuple(self.minutes))
            near = minutes[bisect_left(minutes, start - 58) :]
            ahead = (minute + second for minute in near for second in self.seconds)
            return next((moment for moment in ahead if moment > start), None)
        begins = int(midnight.timestamp())
        time = self._time_of_day(max(start + 1 - begins, 0))
        return None if time is None else begins + time

    def _time_of_day(self, least: int) -> int | None:
        """Return the first of the pattern's times, in seconds since midnight, that is no less than `least`."""
        for hour in self.hours[bisect_left(self.hours, least // 3_600) :]:
            left = max(least - hour * 3_600, 0)
            for minute in self.minutes[bisect_left(self.minutes, left // 60) :]:
                if (second := _first(self.seconds, left - minute * 60)) is not None:
                    return hour * 3_600 + minute * 60 + second
        return None


def _clocks_change(midnight: datetime) -> bool:
    """Tell whether they may do so between this midnight and the next."""
    following = midnight + timedelta(days=1)
    offsets = {each.utcoffset() for each in (midnight, midnight.replace(fold=1), following.replace(fold=1))}
    return len(offsets) > 1


@lru_cache(maxsize=128)
def _minutes_of(day: date, zone: tzinfo, hours: Sequence[int], minutes: Sequence[int]) -> Sequence[int]:
    """Return when these minutes of a day come, in seconds since 1970, if the clocks change on it."""
    midnight = datetime(day.year, day.month, day.day, tzinfo=zone)
    times = (midnight + timedelta(hours=hour, minutes=minute) for hour in hours for minute in minutes)
    return sorted({moment for time in times for moment in _moments(time, every_hour=len(hours) == 24)})


def _moments(time: datetime, *, every_hour: bool) -> Sequence[int]:
    """Return when a minute comes that the clocks may skip, or show twice; with `every_hour` as real hours do."""
    moment = int(time.timestamp())
    shift = int(time.replace(fold=1).timestamp()) - moment  # by how much later it is shown again; < 0: it is skipped
    keeps_to_hours = every_hour and shift % HOUR == 0
    if shift < 0 and keeps_to_hours:
        return ()
    if shift <= -HOUR:
        return _moments(time + timedelta(hours=1), every_hour=False)
    return (moment, moment + shift) if shift > 0 and keeps_to_hours else (moment,)


def find_zone(name: object) -> tzinfo:
    """Return the time zone; without a name, this process's own, as a process of Node does.

    Raises:
        UnreadablePattern: there is no such zone.
    """
    if name is None or name == "":
        return _local_zone(os.environ.get("TZ", ""))
    if not isinstance(name, str) or not _ZONE.fullmatch(name):
        raise UnreadablePattern(f"there is no time zone {str(name)[:100]!r}")
    try:
        return UTC if name.upper() in ("UTC", "GMT") else ZoneInfo(name)
    except (ValueError, OSError, ZoneInfoNotFoundError) as error:
        raise UnreadablePattern(f"there is no time zone {name[:100]!r}") from error


@cache
def _local_zone(name: str) -> tzinfo:
    """Return the zone that `TZ` names, which may be a file; without a name, the machine's."""
    named = name.removeprefix(":")
    if named and not named.startswith("/"):
        return find_zone(named)
    try:
        with Path(named or "/etc/localtime").open("rb") as file:
            return ZoneInfo.from_file(file)
    except (ValueError, OSError) as error:
        raise UnreadablePattern("the time zone of this machine is unknown; set TZ to its name") from error


def read_pattern(text: str) -> CronPattern:
    """Return the pattern.

    Raises:
        UnreadablePattern: Node's versions read it differently, or it is no pattern.
    """
    if len(text) > LONGEST_PATTERN:
        raise UnreadablePattern(f"a cron pattern of {len(text)} characters")
    fields = MACROS.get(text, text).split()
    if not 1 <= len(fields) <= 6:
        raise UnreadablePattern(f"the cron pattern {text!r} has {len(fields)} fields")
    try:
        return _read_fields([*MISSING_FIELDS[: 6 - len(fields)], *fields])
    except ValueError as error:
        raise UnreadablePattern(f"the cron pattern {text!r}: {error}") from error


def _read_fields(fields: Sequence[str]) -> CronPattern:
    months = frozenset(_values(_named(fields[4], _MONTHS), 1, 12))
    days, last_day, day_count = _read_days(fields[3], months)
    weekdays, last_weekdays, nth = _read_weekdays(_named(fields[5], _WEEKDAYS))
    every_day, every_weekday = fields[3] in ANY, fields[5] in ANY
    # For version 4 a field with as many values as there are is like `*`, and `#` is about both fields.
    uncertain = nth or len(weekdays) == 7 or day_count >= min(_LONGEST_MONTHS[month - 1] for month in months)
    if uncertain and not every_day and not every_weekday:
        raise ValueError("Node's versions combine these days of the month and of the week differently")
    return CronPattern(
        seconds=_values(fields[0], 0, 59),
        minutes=_values(fields[1], 0, 59),
        hours=_values(fields[2], 0, 23),
        days=None if every_day else days,
        last_day=last_day,
        months=months,
        weekdays=frozenset() if every_weekday else weekdays,
        last_weekdays=last_weekdays,
        nth=nth,
    )


def _read_days(text: str, months: frozenset[int]) -> tuple[frozenset[int], bool, int]:
    """Return the days, whether the last of a month is one, and how many values version 4 of `cron-parser` counts."""
    atoms = text.split(",")
    lasts = atoms.count("L")
    values = [value for atom in atoms if atom != "L" for value in _range(atom.replace("?", "*"), 1, 31)]
    if len(months) == 1:
        longest = _LONGEST_MONTHS[min(months) - 1]
        if values and min(values) > longest:
            raise ValueError("the month has no such day")
        values = [value for value in values if value <= longest]
    return frozenset(values), lasts > 0, len(values) + lasts


def _read_weekdays(text: str) -> tuple[frozenset[int], frozenset[int], int]:
    if nth := _NTH_WEEKDAY.fullmatch(text):
        return frozenset({int(nth[1]) % 7}), frozenset(), int(nth[2])
    atoms = text.split(",")
    lasts = [int(atom[0]) % 7 for atom in atoms if _LAST_WEEKDAY.fullmatch(atom)]
    values = [value for atom in atoms if not _LAST_WEEKDAY.fullmatch(atom) for value in _weekday_range(atom)]
    if len(values) + len(lasts) >= 8 and len(set(values)) < 8:
        raise ValueError("days of the week are repeated")  # version 4 takes any eight values for all there are
    return frozenset(value % 7 for value in values), frozenset(lasts), 0


def _weekday_range(atom: str) -> list[int]:
    """Return the values as `cron-parser` counts them: Sunday is 0 and 7, and both if it ends a range."""
    found = _range(atom.replace("?", "*"), 0, 7)
    values = list(found)
    if found.stop == 8 and 0 not in values and not atom.isdigit():
        if 7 not in values:
            raise ValueError(f"Node's versions read {atom!r} differently")
        values.append(0)
    return values


def _values(text: str, lowest: int, highest: int) -> tuple[int, ...]:
    return tuple(sorted({value for atom in text.split(",") for value in _range(atom, lowest, highest)}))


def _range(atom: str, lowest: int, highest: int) -> range:
    """Return the values of one part of a field: a number or a range, or all, each with or without a step."""
    found = _RANGE.fullmatch(atom)
    if found is None:
        raise ValueError(f"what is {atom!r}?")
    first = lowest if found["every"] else int(found["first"])
    last = int(found["last"] or (highest if found["every"] or found["step"] else first))
    step = int(found["step"] or 1)
    if not lowest <= first <= last <= highest or step == 0:
        raise ValueError(f"{atom!r} is not within {lowest}-{highest}")
    return range(first, last + 1, step)


def _named(text: str, names: Sequence[str]) -> str:
    """Return the field with numbers in the place of names."""

    def number(name: re.Match[str]) -> str:
        if name[0].lower() not in names:
            raise ValueError(f"what is {name[0]!r}?")
        return str(names.index(name[0].lower()))

    return _NAME.sub(number, text)


def _first(values: Sequence[int], least: int) -> int | None:
    """Return the first of the sorted values that is no less than `least`."""
    at = bisect_left(values, least)
    return values[at] if at < len(values) else None
