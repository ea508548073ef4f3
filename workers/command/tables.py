"""Results as text: columns for people, JSON for programs. What comes out of a storage cannot control a terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from workers.jobs import WorkerInfo
from workers.worker.events import log_line

_STEPS: Final = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))


def one_line(text: str) -> str:
    """Return the text as one line that no terminal obeys."""
    return "".join(each if each.isprintable() else log_line(each) for each in log_line(text))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows in columns, below their heads if there are any."""
    cells = [[one_line(cell) for cell in row] for row in ([heads] if heads else []) + list(rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells)
    return "\n".join(lines)


def as_json(value: object) -> str:
    """Return the value as JSON in ASCII; what JSON cannot hold is shown as Python does."""
    return json.dumps(value, default=repr)


def heard(worker: WorkerInfo) -> str:
    """Say when the worker was last heard of, or that this is too long ago for one that is alive."""
    how_long = age(worker.seen_at)
    return f"not heard of for {how_long}" if worker.is_silent else f"seen {how_long} ago"


def age(moment: datetime) -> str:
    """Return how long ago it was, in its largest unit."""
    seconds = max((datetime.now(UTC) - moment).total_seconds(), 0)
    length, unit = next((step for step in _STEPS if seconds >= step[0]), _STEPS[-1])
    return f"{seconds / length:.0f}{unit}"
