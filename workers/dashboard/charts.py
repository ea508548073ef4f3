"""Charts as plain SVG, drawn by the templates: here are the places of what they draw.

Colours come from the style sheet, by class. Each chart has a title that says what it shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

LEFT: Final = 42
TOP: Final = 10
BOTTOM: Final = 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of columns; `style` is its class in the style sheet."""

    name: str
    values: Sequence[float]
    style: str = "main"


@dataclass(frozen=True, slots=True)
class Bar:
    """A rectangle of one style."""

    x: float
    y: float
    width: float
    height: float
    style: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """A column for each moment, from left to right, with the layers on top of each other."""

    title: str
    width: int
    height: int
    bars: Sequence[Bar]
    ticks: Sequence[tuple[float, str]]
    """The lines of the grid: how high, and what they say."""
    labels: Sequence[tuple[float, str]]
    """What stands below: where, and what it says."""
    left: int = LEFT


def columns(
    title: str, layers: Sequence[Layer], labels: Sequence[str], *, width: int = 520, height: int = 150
) -> Columns:
    """Lay out columns; the labels are spread evenly below, the first at the left end, the last at the right."""
    count = max((len(layer.values) for layer in layers), default=0)
    totals = [sum(layer.values[at] for layer in layers) for at in range(count)]
    marks = _marks(max(totals, default=0))
    step = (width - LEFT) / max(count, 1)
    room = height - TOP - BOTTOM

    def y(value: float) -> float:
        return round(height - BOTTOM - room * value / marks[-1], 2)

    bars = []
    for at in range(count):
        below = 0.0
        for layer in layers:
            if value := layer.values[at]:
                top, base = y(below + value), y(below)
                gap = 1 if step > 3 else 0
                bars.append(
                    Bar(round(LEFT + at * step, 2), top, round(step - gap, 2), round(base - top, 2), layer.style)
                )
                below += value
    places = [LEFT + (width - LEFT) * at / max(len(labels) - 1, 1) for at in range(len(labels))]
    return Columns(
        title=title,
        width=width,
        height=height,
        bars=bars,
        ticks=[(y(mark), _number(mark)) for mark in marks],
        labels=[(round(place, 1), label) for place, label in zip(places, labels, strict=True)],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A part of a whole, drawn as a piece of one bar."""

    name: str
    count: int
    style: str
    x: float
    width: float


def shares(counts: Sequence[tuple[str, int, str]], *, width: float = 100.0, least: float = 1.2) -> list[Share]:
    """Lay out the parts (name, number, style) of a whole along one bar; none that is there is too small to be seen."""
    total = sum(count for _, count, _ in counts)
    seen = [(name, count, style) for name, count, style in counts if count]
    if not total:
        return []
    widths = [max(width * count / total, least) for _, count, _ in seen]
    scale = width / sum(widths)
    found, x = [], 0.0
    for (name, count, style), wide in zip(seen, widths, strict=True):
        found.append(Share(name=name, count=count, style=style, x=round(x, 2), width=round(wide * scale, 2)))
        x += wide * scale
    return found


def _marks(highest: float) -> list[float]:
    """Return two to four round numbers from 0 up, the last not below the highest value."""
    if highest <= 0:
        return [0, 1]
    rough = highest / 3
    unit = 10.0 ** math.floor(math.log10(rough)) if rough >= 1 else 1.0
    step = next((unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough), unit)
    return [step * number for number in range(math.ceil(highest / step - 1e-9) + 1)]


def _number(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 10_000 else f"{value:g}"
