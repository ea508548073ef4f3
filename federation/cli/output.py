"""How results are printed: JSON for programs, tables and sentences for people. Nothing here can control a terminal.

They are printed to `sys.stdout` by name: where that is ASCII, Click would print UTF-8 to a stream of its own instead of
escapes; see `federation.base.terminal.show_escapes`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from enum import Enum
from typing import Final, TypeAlias

import typer

from federation.base.terminal import escaped_json, spaced
from federation.cli.problems import NOT_FOUND, fail

COLUMN_GAP: Final = 2
NARROWEST: Final = 20
"""The least number of characters for which a folded column has room."""
STATES: Final = frozenset({"STATE", "LINK", "OUTCOME"})
"""The columns whose cells are states."""
COLOURS: Final = {
    **dict.fromkeys(("up", "done", "delivered"), "green"),
    **dict.fromkeys(("held", "on hold", "resting", "retryable", "lost"), "yellow"),
    **dict.fromkeys(("failed", "expired", "down", "refusing", "mismatch", "permanent", "given up"), "red"),
}
"""Those of states of which somebody may want to know at a glance."""

Paint: TypeAlias = Callable[[str, str, str], str]
"""Returns the text that shows a cell, given its column, its value and that text."""


def print_json(value: object) -> None:
    """Print *value* on stdout as one JSON document: days and times in ISO 8601, durations in seconds."""
    typer.echo(escaped_json(json.dumps(jsonable(value), ensure_ascii=False, indent=2)), file=sys.stdout)


def print_lines(lines: Iterable[str]) -> None:
    """Print each as one line on stdout."""
    for line in lines:
        typer.echo(shown(line), file=sys.stdout)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table: fitted to a terminal, with states in colour, or else in full: nothing is cut for a program."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    paint = painted if has_colours() else plain
    for line in table_lines(columns, [[shown(cell) for cell in row] for row in rows], width, paint=paint):
        typer.echo(line, file=sys.stdout, color=has_colours())


def has_colours() -> bool:
    """Tell whether stdout is a terminal that shows colours to somebody who wants them (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def plain(column: str, cell: str, text: str) -> str:
    """Return the text that shows a cell."""
    return text


def painted(column: str, cell: str, text: str) -> str:
    """Return the text that shows a cell in the colour of its state, if it is one."""
    colour = COLOURS.get(cell) if column.upper() in STATES else None
    return text if colour is None else typer.style(text, fg=colour)


def table_lines(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None, *, paint: Paint = plain
) -> Iterator[str]:
    """Yield a line for each row if they fit into `width`, possibly with the last column folded; else one for each cell.

    A value that would fit into a line of its own is not broken. No value is left out, except those that say nothing.
    """
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    before = sum(widths[:-1]) + COLUMN_GAP * (len(widths) - 1)
    room = widths[-1] if width is None else min(widths[-1], width - before)
    longest = max((len(word) for row in rows for word in row[-1].split()), default=0)
    if room < min(widths[-1], max(NARROWEST, longest)):
        yield from _records(columns, rows, width or 0, paint)
        return
    for row in (columns, *rows):
        cells = [
            paint(name, cell, cell) + " " * (each + COLUMN_GAP - len(cell))
            for name, cell, each in zip(columns[:-1], row[:-1], widths[:-1], strict=True)
        ]
        first, *more = _folded(row[-1], room)
        # In a table of two columns the first one names what the second one says.
        last = row[0] if columns[0] == "" else columns[-1]
        yield f"{''.join(cells)}{paint(last, row[-1], first)}".rstrip()
        yield from (" " * before + each for each in more)


def _records(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, paint: Paint) -> Iterator[str]:
    """Yield each row under its first cell, with a line for each of the other cells that has something to say.

    The rows of a table without a first name tell of one thing, which the second name is: they are one record.
    """
    if columns[0] == "":
        names, values = zip(*rows, strict=True)
        columns, rows = ("", *names), [(columns[1], *values)]
    label = max(map(len, columns[1:]), default=0) + 2 * COLUMN_GAP
    for row in rows:
        yield from _folded(f"{columns[0]} {row[0]}".strip(), width)
        for name, cell in zip(columns[1:], row[1:], strict=True):
            if cell in ("", "-"):
                continue
            beside = len(cell) <= width - label
            lines = _folded(cell, width - label if beside else width - 2 * COLUMN_GAP)
            named = f"{'':{COLUMN_GAP}}{name}".ljust(label)
            yield f"{named}{paint(name, cell, lines[0])}" if beside else named.rstrip()
            yield from (f"{'':{2 * COLUMN_GAP}}{each}" for each in ([] if beside else lines))


def _folded(text: str, width: int) -> list[str]:
    """Fold the text into lines, between words if possible."""
    return textwrap.wrap(text, max(width, 1), break_on_hyphens=False) or [""]


def shown(value: object) -> str:
    """Format *value* in one line for people.

    What other servers wrote may hold anything, and must not control a terminal.
    """
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case datetime():
            return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
        case Enum():
            return spaced(str(value.value))
    return spaced(str(value))


def confirm(question: str, *, yes: bool) -> None:
    """Ask the operator, and end the command with status 1 unless they agree. Without a terminal `--yes` is needed."""
    if yes:
        return
    if not sys.stdin.isatty():
        fail(f"{question} Nothing was done; say --yes where nobody can be asked.", status=NOT_FOUND)
    typer.confirm(spaced(question), abort=True, err=True)


@contextmanager
def lasting(what: str, *, after: float = 2) -> Iterator[None]:
    """Say on stderr, if that is a terminal, what lasts for more than `after` seconds, and how long it has by now."""
    if not sys.stderr.isatty():
        yield
        return
    over = threading.Event()
    told = threading.Thread(target=_tell_how_long, args=(what, after, over), daemon=True)
    told.start()
    try:
        yield
    finally:
        over.set()
        told.join()


def _tell_how_long(what: str, after: float, over: threading.Event) -> None:
    began = time.monotonic()
    if over.wait(after):
        return
    while True:
        sys.stderr.write(f"\r{what} ... {time.monotonic() - began:.0f} s")
        sys.stderr.flush()
        if over.wait(1):
            sys.stderr.write("\n")
            return


class Bar:
    """Is told how much more is done."""

    def __call__(self, more: int) -> None:
        pass


@contextmanager
def progress(total: int, what: str) -> Iterator[Bar]:
    """Show a progress bar on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield Bar()
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bars:
        task = bars.add_task(what, total=total)

        class ShownBar(Bar):
            def __call__(self, more: int) -> None:
                bars.advance(task, more)

        yield ShownBar()


def jsonable(value: object) -> object:
    """Return the value as JSON has it: days and times in ISO 8601, durations in seconds, a dataclass as an object."""
    match value:
        case datetime():
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case date():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case Enum():
            return value.value
        case Mapping():
            return {str(jsonable(key)): jsonable(each) for key, each in value.items()}
        case list() | tuple():
            return [jsonable(each) for each in value]
    if dataclasses.is_dataclass(value):
        return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value
