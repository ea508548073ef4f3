"""How results are printed: JSON for programs, tables and sentences for people. Nothing here can control a terminal.

They are printed to `sys.stdout` by name: where that is ASCII, Click would print UTF-8 to a stream of its own instead of
escapes; see `federation.base.terminal.show_escapes`.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import Enum
from typing import Final

import typer

from federation.base.terminal import escaped_json, spaced
from federation.cli.problems import NOT_FOUND, fail

COLUMN_GAP: Final = 2
NARROWEST: Final = 20
"""The least number of characters for which a folded column has room."""


def print_json(value: object) -> None:
    """Print *value* on stdout as one JSON document: days and times in ISO 8601, durations in seconds."""
    from workers.jsonable import jsonable

    typer.echo(escaped_json(json.dumps(jsonable(value), ensure_ascii=False, indent=2)), file=sys.stdout)


def print_lines(lines: Iterable[str]) -> None:
    """Print each as one line on stdout."""
    for line in lines:
        typer.echo(shown(line), file=sys.stdout)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table: fitted to a terminal, or else in full, so that nothing is cut for a program."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in table_lines(columns, [[shown(cell) for cell in row] for row in rows], width):
        typer.echo(line, file=sys.stdout)


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> Iterator[str]:
    """Yield a line for each row if they fit into `width`, possibly with the last column folded; else one for each cell.

    A value that would fit into a line of its own is not broken. No value is left out, except those that say nothing.
    """
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    before = sum(widths[:-1]) + COLUMN_GAP * (len(widths) - 1)
    room = widths[-1] if width is None else min(widths[-1], width - before)
    if room < min(widths[-1], NARROWEST):
        yield from _records(columns, rows, width or 0)
        return
    for row in (columns, *rows):
        start = "".join(cell.ljust(each + COLUMN_GAP) for cell, each in zip(row[:-1], widths[:-1], strict=True))
        first, *more = _folded(row[-1], room)
        yield f"{start}{first}".rstrip()
        yield from (" " * before + each for each in more)


def _records(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Yield each row under its first cell, with a line for each of the other cells that has something to say."""
    label = max(map(len, columns[1:]), default=0) + 2 * COLUMN_GAP
    for row in rows:
        yield from _folded(f"{columns[0]} {row[0]}".strip(), width)
        for name, cell in zip(columns[1:], row[1:], strict=True):
            if cell in ("", "-"):
                continue
            beside = len(cell) <= width - label
            lines = _folded(cell, width - label if beside else width - 2 * COLUMN_GAP)
            named = f"{'':{COLUMN_GAP}}{name}".ljust(label)
            yield f"{named}{lines[0]}" if beside else named.rstrip()
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
