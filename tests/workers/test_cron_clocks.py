"""Crons in nights in which the clocks change, against a count of what the clocks show, minute by minute."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from itertools import pairwise
from typing import Final
from zoneinfo import ZoneInfo, available_timezones

import pytest

from workers.cron import CronPattern, read_pattern

DAY, HOUR, MINUTE = 86_400, 3_600, 60
FIRST, LAST = int(datetime(2020, 1, 1, tzinfo=UTC).timestamp()), int(datetime(2031, 1, 1, tzinfo=UTC).timestamp())
ODD: Final = (
    *("Africa/Cairo", "Asia/Beirut", "America/Santiago", "America/Havana"),  # midnight is skipped, or comes twice
    *("Australia/Lord_Howe", "Pacific/Chatham", "Antarctica/Troll"),  # half an hour; at a quarter to; two hours
    *("America/Godthab", "America/Scoresbysund", "Africa/Casablanca", "Asia/Gaza", "Europe/Dublin"),
    *("Europe/Berlin", "America/New_York", "Australia/Adelaide", "America/Sao_Paulo"),
)


@dataclass(frozen=True, kw_only=True)
class Times:
    """A pattern of hours (None: all), minutes and days of the week (None: all), from Sunday on."""

    hours: Sequence[int] | None
    minutes: Sequence[int]
    weekdays: Sequence[int] | None = None

    @property
    def text(self) -> str:
        weekdays = "*" if self.weekdays is None else _listed(self.weekdays)
        return f"{_listed(self.minutes)} {'*' if self.hours is None else _listed(self.hours)} * * {weekdays}"


def _listed(values: Sequence[int]) -> str:
    return ",".join(map(str, values))


def patterns(count: int, seed: int) -> Iterator[Times]:
    """Once a day at any time, most of them at night; and some that come more often, or on some days alone."""
    chance = random.Random(seed)
    for number in range(count):
        minutes = sorted(chance.sample((0, 1, 10, 15, 29, 30, 31, 45, 50, 59), chance.choice((1, 1, 2))))
        night = [*range(5), 22, 23]
        hours = None if number % 8 == 0 else sorted(chance.sample(night, chance.choice((1, 1, 1, 2, 4))))
        hours = [chance.randrange(24)] if number % 8 == 1 else hours
        weekdays = sorted(chance.sample(range(7), 3)) if number % 8 == 2 else None
        yield Times(hours=hours, minutes=minutes, weekdays=weekdays)


def changes(zone: ZoneInfo) -> list[int]:
    """When its clocks change, in seconds since 1970."""
    found = []
    for day in range(FIRST, LAST, DAY):
        low, high = day, day + DAY
        if _offset(low, zone) == _offset(high, zone):
            continue
        while high - low > MINUTE:
            between = (low + high) // 2 // MINUTE * MINUTE
            low, high = (between, high) if _offset(between, zone) == _offset(low, zone) else (low, between)
        found.append(high)
    return found


def _offset(at: int, zone: ZoneInfo) -> int:
    return int(datetime.fromtimestamp(at, zone).utcoffset().total_seconds())  # type: ignore[union-attr]  # it is aware


class Shown:
    """What the clocks of a zone show, a minute at a time, within three days of a moment."""

    def __init__(self, zone: ZoneInfo, around: int) -> None:
        self.at: Mapping[datetime, list[int]] = defaultdict(list)
        self.days: dict[date, None] = {}
        before, change = _offset(around - 3 * DAY, zone), 0
        for at in range(around - 3 * DAY, around + 3 * DAY, MINUTE):
            wall = datetime.fromtimestamp(at, zone).replace(tzinfo=None, fold=0)
            self.at[wall].append(at)
            self.days[wall.date()] = None
            change = change or _offset(at, zone) - before
        self._change = change

    def expected(self, times: Times) -> set[int]:
        """When the pattern comes: on the days that begin and end within, and so far as it is certain."""
        days = list(self.days)[1:-1]
        wanted = [day for day in days if times.weekdays is None or day.isoweekday() % 7 in times.weekdays]
        hours = range(24) if times.hours is None else times.hours
        midnights = [datetime.combine(day, time()) for day in wanted]
        walls = [
            midnight + timedelta(hours=hour, minutes=minute)
            for midnight in midnights
            for hour in hours
            for minute in times.minutes
        ]
        return {at for wall in walls for at in self._moments(wall, as_real_hours=times.hours is None)}

    def _moments(self, wall: datetime, *, as_real_hours: bool) -> Collection[int]:
        if as_real_hours and self._change % HOUR == 0:
            return self.at.get(wall, ())
        step = timedelta(seconds=self._change if 0 < self._change < HOUR else HOUR)
        while wall not in self.at:  # skipped: at the same minute of the next hour that there is
            wall += step
        return self.at[wall][:1]


def ours(pattern: CronPattern, zone: ZoneInfo, after: int, until: int) -> list[int]:
    """When the pattern comes, each time asked for anew, as those who tick a cron do."""
    found: list[int] = []
    at = after
    while (following := pattern.next_after(at * 1_000, zone)) is not None and following < until * 1_000:
        at = following // 1_000
        found.append(at)
    return found


def check(times: Times, zone: ZoneInfo, around: int, shown: Shown) -> None:
    after, until = around - 2 * DAY, around + 2 * DAY
    found = ours(read_pattern(times.text), zone, after, until)
    expected = sorted(at for at in shown.expected(times) if after < at < until)
    assert found == expected, (times.text, zone.key, datetime.fromtimestamp(around, UTC).isoformat())
    if times.weekdays is None and times.hours is not None and len(times.hours) * len(times.minutes) == 1:
        pauses = {b - a for a, b in pairwise(found)}
        assert len(found) in (3, 4, 5)
        assert all(DAY - 3 * HOUR <= pause <= DAY + 3 * HOUR for pause in pauses), (times.text, zone.key, pauses)


@pytest.mark.parametrize("name", ODD)
def test_each_time_comes_once(name: str) -> None:
    """In two nights of each kind of change, whatever the clocks do, from wherever one asks."""
    zone = ZoneInfo(name)
    for seed, around in enumerate([*changes(zone)[:2], *changes(zone)[-2:]]):
        shown = Shown(zone, around)
        for times in patterns(24, seed):
            check(times, zone, around, shown)


def zones() -> list[ZoneInfo]:
    """Every zone of the database, those of the same offsets once."""
    different: dict[tuple[tuple[int, int], ...], ZoneInfo] = {}
    for name in sorted(available_timezones()):
        zone = ZoneInfo(name)
        offsets = tuple((at, _offset(at, zone)) for at in [FIRST, *changes(zone)])
        different.setdefault(offsets, zone)
    return list(different.values())


@pytest.mark.full
@pytest.mark.timeout(1_800)
def test_each_time_comes_once_in_every_zone() -> None:
    """200 patterns within two days of each change from 2020 to 2030, and on 1 000 days of any kind."""
    everywhere = zones()
    assert len(everywhere) > 80
    for zone in everywhere:
        for around in changes(zone):
            shown = Shown(zone, around)
            for times in patterns(200, seed=1):
                check(times, zone, around, shown)
    chance = random.Random(2)
    for number in range(1_000):
        zone, around = chance.choice(everywhere), chance.randrange(FIRST, LAST, MINUTE)
        shown = Shown(zone, around)
        for times in patterns(10, number):
            check(times, zone, around, shown)
