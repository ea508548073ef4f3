"""`federation doctor`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import typer

from federation import interrupts
from federation.cli.options import AsJson
from federation.cli.output import has_colours, print_json, shown
from federation.cli.problems import NOT_FOUND
from federation.cli.session import LogLevel, start_logging

if TYPE_CHECKING:
    from federation.admin.doctor.doctor import Finding

_COLOURS: Final = {"ok": "green", "note": "blue", "warning": "yellow", "failure": "red"}


def doctor(as_json: AsJson = False) -> None:
    """Examine this node: is all in order?

    Checks settings, keys, database, queues, clocks, recurring work, backlog, and whether the node answers at its own
    URL. Says what to do about problems, and changes nothing. Exit status 1 for a failure, but not for a warning or a
    note.
    """
    from federation.admin.doctor.checks import Verdict
    from federation.admin.doctor.doctor import examine, worst

    start_logging(LogLevel.ERROR)
    findings = interrupts.run(examine())
    if as_json:
        print_json({"verdict": worst(findings), "findings": findings})
    else:
        for finding in findings:
            _print(finding)
    if worst(findings) is Verdict.FAILURE:
        raise typer.Exit(NOT_FOUND)


def _print(finding: Finding) -> None:
    verdict = typer.style(f"{finding.verdict.value:8}", fg=_COLOURS[finding.verdict.value])
    typer.echo(f"{verdict} {finding.check:10} {shown(finding.found)}", file=sys.stdout, color=has_colours())
    if finding.advice:
        typer.echo(f"{'':8} {'':10} -> {shown(finding.advice)}", file=sys.stdout)
