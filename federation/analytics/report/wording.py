"""Numbers and times as people read them. None becomes a dash: nothing was measured."""

from __future__ import annotations

import re
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NOTHING: Final = "\u2013"
_THIN: Final = "\u202f"  # a narrow space that does not break

_DATE: Final = re.compile(r"(?<!\d)\d{4}-\d\d-\d\d(?!\d)", re.ASCII)
_STEPS: Final = ((timedelta(days=1), "d"), (timedelta(hours=1), "h"), (timedelta(minutes=1), "min"))


def count(number: int | None) -> str:
    return NOTHING if number is None else f"{number:,}".replace(",", _THIN)


def percent(ratio: float | None) -> str:
    """Format a ratio with one decimal; it is never rounded up to 100 or down to 0."""
    if ratio is None:
        return NOTHING
    if 0 < ratio < 1:
        ratio = min(max(ratio, 0.001), 0.999)
    return f"{ratio * 100:.0f}{_THIN}%" if ratio in (0, 1) else f"{ratio * 100:.1f}{_THIN}%"


def points(change: float | None) -> str:
    """Format the difference of two ratios."""
    if change is None:
        return NOTHING
    rounded = round(change * 100, 1)
    return "unchanged" if rounded == 0 else f"{'up' if rounded > 0 else 'down'} {abs(rounded):g} points"


def growth(now: int, before: int) -> str:
    """Say how much more it is than it was."""
    if before == 0:
        return "none before" if now else NOTHING
    if now >= 3 * before:
        return f"{now / before:.0f} times as many"
    rounded = round((now / before - 1) * 100)
    return "unchanged" if rounded == 0 else f"{'up' if rounded > 0 else 'down'} {abs(rounded)}{_THIN}%"


def difference(now: int, before: int) -> str:
    number = now - before
    return f"+{number:g}" if number > 0 else f"\u2212{-number:g}" if number < 0 else "±0"


def score(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0f}"


def milliseconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:.0f}{_THIN}ms" if value < 1000 else f"{value / 1000:.1f}{_THIN}s".replace(".0", "")


def day(value: date | None) -> str:
    return NOTHING if value is None else f"{value.day}{_THIN}{value:%b}"


def day_and_year(value: date | None) -> str:
    return NOTHING if value is None else f"{day(value)} {value.year}"


def moment(value: datetime | None) -> str:
    return NOTHING if value is None else f"{day_and_year(value)}, {value:%H:%M}"


def with_dates(text: str) -> str:
    """Return the text with its dates as the report writes them; what only looks like one stays."""
    return _DATE.sub(_date, text)


def _date(found: re.Match[str]) -> str:
    try:
        return day_and_year(date.fromisoformat(found.group()))
    except ValueError:
        return found.group()


def duration(value: timedelta) -> str:
    """Format a duration in its two largest units; less than a minute is `0 min`."""
    parts = []
    for step, unit in _STEPS:
        whole, value = divmod(max(value, timedelta()), step)
        parts.append((whole, unit))
    first = next((place for place, (whole, _) in enumerate(parts) if whole), len(parts) - 1)
    shown = [part for part in parts[first : first + 2] if part[0]] or [parts[-1]]
    return " ".join(f"{whole}{_THIN}{unit}" for whole, unit in shown)


def seconds(value: float | None) -> str:
    return NOTHING if value is None else duration(timedelta(seconds=value))


def days(values: Sequence[date]) -> str:
    """Write the days, oldest first; those in a row as the first and the last of them."""
    spans: list[list[date]] = []
    for value in values:
        if spans and value - spans[-1][-1] == timedelta(days=1):
            spans[-1].append(value)
        else:
            spans.append([value])
    return ", ".join(day(span[0]) if len(span) == 1 else f"{day(span[0])} to {day(span[-1])}" for span in spans)


def short(text: str, limit: int) -> str:
    """Return the text, cut if it is longer than anybody reads."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def named(url: str, limit: int = 60) -> str:
    """Return a server's URL without the scheme that nearly all have."""
    return short(url.removeprefix("https://"), limit)


def told(reason: str, limit: int) -> str:
    """Return a reason as the beginning of a sentence."""
    return sentence(with_dates(short(reason, limit)))


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def plural(number: int, noun: str) -> str:
    """Write a number of things, in the plural of a delivery or a day."""
    if number == 1:
        return f"{count(number)} {noun}"
    return f"{count(number)} {noun[:-1]}ies" if noun.endswith("ry") else f"{count(number)} {noun}s"


def total(parts: Mapping[str, int]) -> str:
    """Write what a number is the sum of, without what is none of it."""
    return " + ".join(f"{count(number)} {name}" for name, number in parts.items() if number) or "none"
