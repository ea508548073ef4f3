"""How results are printed: JSON for programs, tables and sentences for people. Nothing here can steer a terminal."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from enum import Enum
from typing import Final

import typer

from federation.cli.problems import NOT_FOUND, fail

COLUMN_GAP: Final = 2


def print_json(value: object) -> None:
    """*value* is on stdout as one JSON document; days and times in ISO 8601, durations in seconds."""
    typer.echo(json.dumps(_jsonable(value), ensure_ascii=False, indent=2))


def print_lines(lines: Iterable[str]) -> None:
    """Each is one line on stdout."""
    for line in lines:
        typer.echo(shown(line))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table: fitted to the terminal, or, where there is none, in full, so that nothing is cut for a program."""
    cells = [[shown(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        for row in (columns, *cells):
            line = (" " * COLUMN_GAP).join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            typer.echo(line.rstrip())
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in cells:
        table.add_row(*(Text(cell, overflow="fold") for cell in row))
    Console().print(table)


def shown(value: object) -> str:
    """*value* in one line for people; what other servers wrote may hold anything, and must not reach a terminal."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case datetime():
            return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
        case Enum():
            return str(value.value)
    return "".join(each if each.isprintable() else " " for each in str(value))


def confirm(question: str, *, yes: bool) -> None:
    """The operator wants it, or the command ends with status 1. Without a terminal there is nobody to ask: `--yes`."""
    if yes:
        return
    if not sys.stdin.isatty():
        fail(f"{question} Nothing was done; say --yes where nobody can be asked.", status=NOT_FOUND)
    typer.confirm(question, abort=True, err=True)


class Bar:
    """Told how much more is done."""

    def __call__(self, more: int) -> None:
        pass


@contextmanager
def progress(total: int, what: str) -> Iterator[Bar]:
    """A progress bar on stderr, where that is a terminal."""
    if not sys.stderr.isatty():
        yield Bar()
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bars:
        task = bars.add_task(what, total=total)

        class Shown(Bar):
            def __call__(self, more: int) -> None:
                bars.advance(task, more)

        yield Shown()


def _jsonable(value: object) -> object:
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
            return {str(_jsonable(key)): _jsonable(each) for key, each in value.items()}
        case list() | tuple():
            return [_jsonable(each) for each in value]
    if dataclasses.is_dataclass(value):
        return {field.name: _jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value
