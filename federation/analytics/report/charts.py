"""Charts as plain SVG: no scripts, colours from the page's style sheet, each with a title that says what it shows.

Sizes are in the pixels that a chart takes on a wide page, so that text in it is as large as the text around it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from markupsafe import Markup

from federation.analytics.report.findings import BAD_DAY
from federation.analytics.report.markup import tag
from federation.analytics.report.wording import day, percent

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from datetime import date

_WIDTH: Final = 340
_HEIGHT: Final = 150
_LEFT: Final = 50
_TOP: Final = 12
_BOTTOM: Final = 28
_LABEL_HEIGHT: Final = 15
_CHARACTER: Final = 7
_STRIP_STEP: Final = 6
_STRIP_HEIGHT: Final = 28


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartSeries:
    """One line or one layer of bars. `style` is its class in the style sheet; a value of None is a day without one.

    `label` stands at a line's end; for None it is the name.
    """

    name: str
    values: Sequence[float | None]
    style: str = "main"
    label: str | None = None

    @property
    def end(self) -> tuple[int, float] | None:
        """The last value, and its place."""
        known = ((place, value) for place, value in enumerate(self.values) if value is not None)
        return max(known, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The area that a chart draws in: days from left to right, values from `low` at the bottom to `high` at the top."""

    width: int
    height: int
    right: int
    days: Sequence[date]
    low: float
    high: float

    def x(self, place: float) -> float:
        """Return the middle of a day's column."""
        return _LEFT + (place + 0.5) * self.step

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.height - _BOTTOM - share * (self.height - _TOP - _BOTTOM)

    @property
    def step(self) -> float:
        return (self.width - _LEFT - self.right) / max(len(self.days), 1)

    @property
    def size(self) -> tuple[int, int]:
        return self.width, self.height


def lines(
    title: str,
    days: Sequence[date],
    series: Sequence[ChartSeries],
    *,
    write: Callable[[float], str],
    scale: Callable[[float], str],
    low: float | None = 0,
    high: float | None = None,
    early: Collection[date] = (),
) -> Markup:
    """Draw lines over days, named and valued at their right end. A `low` or `high` of None depends on the values.

    `write` formats the values, `scale` those of the grid. A line is dashed that leads to one of the `early` days, which
    were read before they were over.
    """
    ticks = _ticks([value for each in series for value in each.values if value is not None], low, high)
    ends = [_end(each, write(value)) for each in series for value in each.values if value is not None]
    right = 20 + _CHARACTER * max(map(len, ends), default=0)
    frame = Frame(width=_WIDTH, height=_HEIGHT, right=right, days=days, low=ticks[0], high=ticks[-1])
    half = {place for place, each in enumerate(days) if each in early}
    paths = (path for each in series for path in _paths(frame, each, half))
    return _svg(title, frame.size, *_grid(frame, ticks, scale), *paths, *_end_labels(frame, series, write))


def bars(
    title: str,
    days: Sequence[date],
    layers: Sequence[ChartSeries],
    *,
    write: Callable[[float], str],
    scale: Callable[[float], str],
    early: Collection[date] = (),
) -> Markup:
    """Draw a column per day, with the layers on top of each other from zero; one of an `early` day is pale.

    It takes what `lines` takes, but bears no numbers for `write` to format.
    """
    totals = [sum(layer.values[place] or 0 for layer in layers) for place in range(len(days))]
    ticks = _ticks(list(totals), 0, None)
    frame = Frame(width=_WIDTH, height=_HEIGHT, right=20, days=days, low=0, high=ticks[-1])
    columns = (
        bar
        for place, each in enumerate(days)
        for bar in _column(frame, layers, place, " early" if each in early else "")
    )
    return _svg(title, frame.size, *_grid(frame, ticks, scale), *columns)


def histogram(title: str, labels: Sequence[str], counts: Sequence[int], *, write: Callable[[float], str]) -> Markup:
    """Draw a bar per group, from left to right, with its number at its end."""
    row, left, width = 24, 110, _WIDTH
    longest = max([*counts, 1])
    rows = []
    for place, (label, number) in enumerate(zip(labels, counts, strict=True)):
        y = place * row
        length = (width - left - 40) * number / longest
        rows += [
            tag("text", label, x=left - 10, y=y + 16, class_="tick end"),
            tag("rect", x=left, y=y + 4, width=float(length), height=row - 8, class_="bar main"),
            tag("text", write(number), x=float(left + length + 6), y=y + 16, class_="label"),
        ]
    return _svg(title, (width, row * len(counts)), *rows)


def strip(days: Sequence[date], ratios: Sequence[float | None]) -> Markup:
    """Draw a column per day: deliveries from below, failures from above, and a dash if nothing was tried.

    Failures of a bad day are at least a third of its column, and others still to be seen.
    """
    paths: dict[str, list[str]] = {"none": [], "main": [], "bad": []}
    for place, ratio in enumerate(ratios):
        x = place * _STRIP_STEP
        if ratio is None:
            paths["none"].append(_bar(x, _STRIP_HEIGHT - 3, _STRIP_HEIGHT))
            continue
        least = _STRIP_HEIGHT / 3 if ratio < BAD_DAY else 4 if ratio < 1 else 0
        lost = max(_STRIP_HEIGHT * (1 - ratio), least)
        paths["main"].append(_bar(x, lost, _STRIP_HEIGHT))
        paths["bad"].append(_bar(x, 0, lost))
    drawn = (tag("path", d="".join(bars), class_=style) for style, bars in paths.items() if any(bars))
    size = (len(ratios) * _STRIP_STEP, _STRIP_HEIGHT)
    return _svg(_strip_title(days, ratios), size, *drawn, style="strip")


def _bar(x: int, top: float, bottom: float) -> str:
    """Return one column of a strip, or nothing if it has no height."""
    return f"M{x} {bottom:.4g}V{top:.4g}h{_STRIP_STEP - 1}V{bottom:.4g}z" if bottom - top >= 0.01 else ""


def _strip_title(days: Sequence[date], ratios: Sequence[float | None]) -> str:
    """Describe what a strip shows, for those who do not see it."""
    known = [(ratio, each) for each, ratio in zip(days, ratios, strict=True) if ratio is not None]
    if not known:
        return "nothing was attempted"
    (worst, on), (latest, last) = min(known), known[-1]
    return (
        f"got through per day: at worst {percent(worst)} on {day(on)}, {percent(latest)} on the last one, {day(last)}"
    )


def _svg(title: str, size: tuple[int, int], *content: Markup, style: str = "chart") -> Markup:
    box = f"0 0 {size[0]} {size[1]}"
    return tag("svg", tag("title", title), *content, viewBox=box, role="img", aria_label=title, class_=style)


def _grid(frame: Frame, ticks: Sequence[float], write: Callable[[float], str]) -> Iterator[Markup]:
    for tick in ticks:
        y = frame.y(tick)
        yield tag("line", x1=_LEFT, x2=frame.width - frame.right, y1=y, y2=y, class_="grid")
        yield tag("text", write(tick), x=_LEFT - 8, y=y + 4, class_="tick end")
    last = len(frame.days) - 1
    for at in sorted({0, last // 2, last}) if last >= 0 else ():
        yield tag("text", day(frame.days[at]), x=frame.x(at), y=frame.height - 5, class_="tick middle")


def _paths(frame: Frame, series: ChartSeries, half: Collection[int]) -> Iterator[Markup]:
    """Yield a line, and what of it leads to the days of `half`."""
    whole = [None if place in half else value for place, value in enumerate(series.values)]
    yield tag("path", d=_path(frame, whole), class_=f"line {series.style}")
    if half:
        rest = [value if {place, place + 1} & set(half) else None for place, value in enumerate(series.values)]
        yield tag("path", d=_path(frame, rest), class_=f"line {series.style} early")


def _path(frame: Frame, values: Sequence[float | None]) -> str:
    """Return a line through the values, broken where there are none. A single value becomes a short dash."""
    commands: list[str] = []
    for place, value in enumerate(values):
        if value is None:
            continue
        point = f"{frame.x(place):.1f} {frame.y(value):.1f}"
        before = values[place - 1] if place else None
        commands.append(f"L{point}" if before is not None else f"M{point}h0.1")
    return "".join(commands)


def _end_labels(frame: Frame, series: Sequence[ChartSeries], write: Callable[[float], str]) -> Iterator[Markup]:
    last = [(frame.y(each.end[1]), frame.x(each.end[0]), each, write(each.end[1])) for each in series if each.end]
    lowest_free = -math.inf
    for y, x, each, written in sorted(last, key=itemgetter(0)):
        text_y = max(y + 4, lowest_free)
        lowest_free = text_y + _LABEL_HEIGHT
        yield tag("circle", cx=x, cy=y, r=3, class_=f"dot {each.style}")
        yield tag("text", _end(each, written), x=x + 8, y=text_y, class_=f"label {each.style}")


def _end(series: ChartSeries, value: str) -> str:
    return f"{series.name if series.label is None else series.label} {value}".strip()


def _column(frame: Frame, layers: Sequence[ChartSeries], place: int, look: str) -> Iterator[Markup]:
    bottom = 0.0
    for layer in layers:
        value = layer.values[place]
        if value:
            top, base = frame.y(bottom + value), frame.y(bottom)
            x, width = frame.x(place) - frame.step / 2, max(frame.step - 2, 0.5)
            yield tag("rect", x=x, y=top, width=width, height=base - top, class_=f"bar {layer.style}{look}")
            bottom += value


def _ticks(values: Sequence[float], low: float | None, high: float | None) -> list[float]:
    """Return two to five round numbers that the values lie between."""
    bottom = low if low is not None else min(values, default=0)
    top = high if high is not None else max(values, default=bottom)
    if top <= bottom:
        top = bottom + 1 if low is not None else bottom + 0.01
    rough = (top - bottom) / 3
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough)
    first = math.floor(bottom / step + 1e-9)
    last = math.ceil(top / step - 1e-9)
    return [round(step * number, 10) for number in range(first, last + 1)]
