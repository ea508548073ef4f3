"""Options that have the same meaning in every command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final, TypeAlias

import typer

MOST_ROWS: Final = 2**63 - 1
"""The greatest number of a row that a database takes."""


def duration(text: str | None) -> str | None:
    """Return the text of a duration, or refuse it as wrong usage."""
    from federation.base.settings.types import parse_duration

    return _parsed(text, parse_duration)


AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON document, for programs.")]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do it without asking.")]
Limit: TypeAlias = Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="How many to show at most.")]
ServerUrl: TypeAlias = Annotated[
    str, typer.Argument(metavar="URL", help="The server: https://peer.example, or peer.example.", show_default=False)
]
Wide: TypeAlias = Annotated[bool, typer.Option("--wide", help="Show all columns.")]
Columns: TypeAlias = Annotated[
    str | None, typer.Option("--columns", metavar="NAME,...", help="Show these columns, as `--wide` names them.")
]
Duration: TypeAlias = Annotated[
    str, typer.Option("--older-than", metavar="DURATION", callback=duration, help="As 30m, 12h or 7d.")
]
OlderThan: TypeAlias = Annotated[
    str | None,
    typer.Option("--older-than", metavar="DURATION", callback=duration, help="Only those older than 30m, 12h or 7d."),
]
MetricsPort: TypeAlias = Annotated[
    int | None,
    typer.Option("--metrics-port", metavar="PORT", help="Serve Prometheus metrics on 127.0.0.1:PORT."),
]
DashboardPort: TypeAlias = Annotated[
    int | None,
    typer.Option("--dashboard-port", metavar="PORT", help="Serve the dashboard on 127.0.0.1:PORT; see `dashboard`."),
]
ShowPayloads: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--show-payloads",
        help="Let operators see in the dashboard what a delivery says, if they ask; that goes into the audit log.",
    ),
]


def _process_number(text: str | None) -> str | None:
    from workers.supervisor import parse_processes

    return _parsed(text, parse_processes)


def _memory(text: str | None) -> str | None:
    from workers.supervisor import parse_bytes

    return _parsed(text, parse_bytes)


def _parsed(text: str | None, parse: Callable[[str], object]) -> str | None:
    """Return the text that `parse` understands, or refuse it as wrong usage."""
    try:
        if text is not None:
            parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return text


Processes: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--processes",
        metavar="N|auto",
        callback=_process_number,
        help="Work in N processes, or one for each processor, that a supervisor keeps running.",
    ),
]
MemoryLimit: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        metavar="SIZE",
        callback=_memory,
        help="Stop and start a process again that has more memory than 300M, or 1G; kill it at twice as much.",
    ),
]


def group(text: str) -> typer.Typer:
    """Make the group of one noun's commands, described by `text`."""
    return typer.Typer(help=text, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})
