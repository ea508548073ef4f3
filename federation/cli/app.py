"""The `federation` command as a whole: its global options, its nouns, and how it ends.

Exit statuses: 0 when all went well; 1 when it found a problem, or nothing to do it to; 2 for wrong usage, wrong
settings, and a database or queue that cannot be reached; 130 after Ctrl-C. Results go to stdout, all else to stderr.

Every command imports what it needs when it is run: help and shell completion load none of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any, Final

import typer
from typer.main import get_command

from federation.cli import (
    actions,
    activities,
    activitypub,
    analytics,
    blacklist,
    dashboard,
    database,
    deliveries,
    held,
    keys,
    queues,
    running,
    scheduler,
    servers,
    users,
)
from federation.cli.doctor import doctor
from federation.cli.problems import INTERRUPTED, NOT_FOUND, asked_for_json, complete, expect, fail, interrupted
from federation.cli.session import LogLevel, set_log_level

EPILOG: Final = (
    "Exit status: 0 all went well; 1 a problem was found, or nothing to do it to; 2 wrong usage or settings, or the "
    "database or queue cannot be reached. Settings come from the environment, then from .env in this directory."
)

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


running.add_to(app)
app.command("upgrade")(database.upgrade_tables)
app.command("doctor")(doctor)
app.command("why")(servers.why)
app.command("dashboard")(dashboard.dashboard)
activities.add_to(app)
app.add_typer(servers.app, name="servers")
held.add_commands(deliveries.app)
app.add_typer(deliveries.app, name="deliveries")
app.add_typer(blacklist.app, name="blacklist")
app.add_typer(queues.app, name="queues")
app.add_typer(scheduler.app, name="scheduler")
app.add_typer(database.app, name="db")
app.add_typer(keys.app, name="keys")
app.add_typer(users.app, name="users")
app.add_typer(activitypub.app, name="activitypub")
app.add_typer(actions.app, name="actions")
app.command("analytics", context_settings=analytics.SETTINGS, add_help_option=False)(analytics.analytics)


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
