"""The `federation` command as a whole: its global options, its nouns, and how it ends.

Exit statuses: 0 when all went well; 1 when it found a problem, or nothing to do it to; 2 for wrong usage, wrong
settings, and a database or queue that cannot be reached; 130 after Ctrl-C. Results go to stdout, all else to stderr.

Every command imports what it needs when it is run: help and shell completion load none of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.main import get_command

from federation import interrupts
from federation.cli import (
    actions,
    activities,
    activitypub,
    blacklist,
    dashboard,
    database,
    deliveries,
    keys,
    queues,
    running,
    scheduler,
    servers,
    users,
)
from federation.cli.options import AsJson
from federation.cli.output import has_colours, print_json, shown
from federation.cli.problems import INTERRUPTED, NOT_FOUND, asked_for_json, complete, expect, fail, interrupted
from federation.cli.session import LogLevel, set_log_level, start_logging

if TYPE_CHECKING:
    from federation.admin.doctor.doctor import Finding

EPILOG: Final = (
    "Exit status: 0 all went well; 1 a problem was found, or nothing to do it to; 2 wrong usage or settings, or the "
    "database or queue cannot be reached. Settings come from the environment, then from .env in this directory."
)
_COLOURS: Final = {"ok": "green", "note": "blue", "warning": "yellow", "failure": "red"}
_UNPARSED: Final = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

app = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EPILOG,
)


def _show_version(asked: bool) -> None:
    """Print which version runs, and end."""
    if asked:
        from workers.version import version

        typer.echo(f"federation {version() or '(not installed)'}")
        raise typer.Exit


@app.callback()
def federation(
    log_level: Annotated[
        LogLevel | None,
        typer.Option("--log-level", help="What to log on stderr. Default: info where something runs, else warning."),
    ] = None,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    """Run a federated server's delivery and inbound side.

    New here? `federation init`, `federation run`. Something wrong? `federation doctor`, `federation why URL`.
    """
    set_log_level(log_level)


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
            _print_finding(finding)
    if worst(findings) is Verdict.FAILURE:
        raise typer.Exit(NOT_FOUND)


def _print_finding(finding: Finding) -> None:
    verdict = typer.style(f"{finding.verdict.value:8}", fg=_COLOURS[finding.verdict.value])
    typer.echo(f"{verdict} {finding.check:10} {shown(finding.found)}", file=sys.stdout, color=has_colours())
    if finding.advice:
        typer.echo(f"{'':8} {'':10} -> {shown(finding.advice)}", file=sys.stdout)


def analytics(context: typer.Context) -> None:
    """Make scorecards and a report of servers, with Spark."""
    from federation.analytics.cli import main as command  # it parses its own arguments

    command(context.args)


running.add_to(app)
app.command("upgrade")(database.upgrade_tables)
app.command("doctor")(doctor)
app.command("why")(servers.why)
app.command("dashboard")(dashboard.dashboard)
activities.add_to(app)
app.add_typer(servers.app, name="servers")
app.add_typer(deliveries.app, name="deliveries")
app.add_typer(blacklist.app, name="blacklist")
app.add_typer(queues.app, name="queues")
app.add_typer(scheduler.app, name="scheduler")
app.add_typer(database.app, name="db")
app.add_typer(keys.app, name="keys")
app.add_typer(users.app, name="users")
app.add_typer(activitypub.app, name="activitypub")
app.add_typer(actions.app, name="actions")
app.command("analytics", context_settings=_UNPARSED, add_help_option=False)(analytics)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command. Return if all went well, otherwise end the process with its status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    expect(given)
    complete(lambda: _run(given))


_UsageError: Final[type[typer.BadParameter]] = typer.BadParameter.__bases__[0]
"""Click's error; Click is a package of its own for older versions of Typer, and a private part of newer ones."""


@cache
def _command() -> Callable[..., Any]:  # Any: the status, or what the command's function returned
    """Make the command of `app`, once. To call `app` would put a hook of Typer's in place of ours for crashes."""
    return get_command(app)


def _run(arguments: list[str]) -> None:
    try:
        status = _command()(args=arguments, prog_name="federation", standalone_mode=False)
    except typer.Abort as abort:
        if isinstance(abort.__context__, KeyboardInterrupt):  # pressed at a question
            interrupted()
        fail("nothing was done", status=NOT_FOUND)
    except _UsageError as error:
        if asked_for_json():
            fail(error.format_message())
        error.show()
        sys.exit(error.exit_code)
    if status == INTERRUPTED:  # Typer's status for a KeyboardInterrupt
        interrupted()
    if status:
        sys.exit(status)
