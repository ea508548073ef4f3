"""Cron patterns of every kind, with a time zone and a time each, drawn at random.

Half of the times are near a change of the clocks.
"""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

ZONES = (
    *("UTC", "Europe/Berlin", "America/New_York", "Australia/Adelaide", "Asia/Kolkata", "America/Sao_Paulo"),
    *("Pacific/Auckland", "Africa/Johannesburg", "Asia/Beirut", "America/Santiago", "Europe/London"),
)
"""Not those whose clocks read midnight twice or change by half an hour: there, Node's versions differ."""
SKIP_MIDNIGHT = ("Asia/Beirut", "America/Santiago")
"""Those of them whose clocks skip it: neither of Node's versions that are tested runs that day's nightly jobs."""
MONTHS = ("jan", "FEB", "mar", "Apr", "jun", "sep", "dec")
WEEKDAYS = ("sun", "MON", "tue", "Wed", "thu", "fri", "sat")
MACROS = ("@yearly", "@monthly", "@weekly", "@daily", "@hourly")
DAYS = ("L", "L", "15,L", "L,10-12", "?")
WEEKDAYS_OF_A_MONTH = ("5L", "0L", "7L", "friL", "fri#3", "1#1", "5#5", "0#2", "1L,3L", "?")
NIGHTLY_MINUTES = ("0", "30", "15,45", "*/10", "59", "30 20")
NIGHTLY_HOURS = ("0", "1", "2", "3", "2,3", "0-3", "1,23", "*/2", "*", "4")

Case = tuple[str, str, int]


class Patterns:
    """A source of cases, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def cases(self, count: int) -> list[Case]:
        """A pattern, a time zone, and a time in milliseconds since 1970."""
        return [self._case() for _ in range(count)]

    def _case(self) -> Case:
        zone = self._random.choice(ZONES)
        start = datetime(self._random.randint(2020, 2030), 1, 1, tzinfo=UTC)
        at = start + timedelta(days=365) * self._random.random()
        pattern = self._pattern()
        if self._random.random() < 0.6 and (changes := _changes(start, ZoneInfo(zone))):
            at = self._random.choice(changes) + timedelta(
                hours=self._random.choice((-2, 2, 24)) * self._random.random()
            )
            if self._random.random() < 0.5:
                pattern = f"{self._random.choice(NIGHTLY_MINUTES)} {self._random.choice(NIGHTLY_HOURS)} * * *"
        at_ms = int(at.timestamp() * 1_000)
        return pattern, zone, at_ms - at_ms % self._random.choice((1, 1_000, 3_600_000))

    def _pattern(self) -> str:
        chance = self._random
        if chance.random() < 0.02:
            return chance.choice(MACROS)
        days, weekdays = self._field(1, 31, 0.5), self._field(0, 7, 0.5, WEEKDAYS)
        if chance.random() < 0.08:
            days = chance.choice(DAYS)
        if chance.random() < 0.08:
            weekdays = chance.choice(WEEKDAYS_OF_A_MONTH)
        fields = [self._field(0, 59, 0.2), self._field(0, 23, 0.3), days, self._field(1, 12, 0.6, MONTHS), weekdays]
        if chance.random() < 0.25:
            fields.insert(0, self._field(0, 59, 0.1))
        elif chance.random() < 0.05:
            del fields[0]
        return " ".join(fields)

    def _field(self, lowest: int, highest: int, every: float, names: tuple[str, ...] = ()) -> str:
        if self._random.random() < every:
            return "*"
        parts = (self._part(lowest, highest, names) for _ in range(self._random.choice((1, 1, 1, 2, 3))))
        return ",".join(dict.fromkeys(parts))

    def _part(self, lowest: int, highest: int, names: tuple[str, ...]) -> str:
        chance = self._random
        first = chance.randint(lowest, highest)
        last = chance.randint(first, highest)
        step = chance.randint(1, max(1, (highest - lowest) // 2))
        plain = chance.choice(names) if names and chance.random() < 0.5 else str(first)
        return chance.choice(
            (plain, plain, plain, f"{first}-{last}", f"{first}-{last}/{step}", f"*/{step}", f"{first}/{step}")
        )


def is_odd(zone: str, at_ms: int) -> bool:
    """Whether Node's walk leaves out a change, or runs what it has run: from within it, or over a midnight skipped."""
    at, until = datetime.fromtimestamp(at_ms / 1_000, UTC), timedelta(days=2 if zone in SKIP_MIDNIGHT else 0)
    hours = [at + timedelta(hours=hour) for hour in range(-2, until.days * 24 + 1)]
    return len({_offset(each, ZoneInfo(zone)) for each in hours}) > 1


def _changes(start: datetime, zone: ZoneInfo) -> list[datetime]:
    """When, in the year from `start` on, the clocks of the zone change, to the minute."""
    days = [start + timedelta(days=day) for day in range(366)]
    return [_change(*pair, zone) for pair in pairwise(days) if _offset(pair[0], zone) != _offset(pair[1], zone)]


def _change(before: datetime, after: datetime, zone: ZoneInfo) -> datetime:
    while after - before > timedelta(minutes=1):
        between = before + (after - before) / 2
        if _offset(between, zone) == _offset(before, zone):
            before = between
        else:
            after = between
    return after


def _offset(at: datetime, zone: ZoneInfo) -> timedelta | None:
    return at.astimezone(zone).utcoffset()
