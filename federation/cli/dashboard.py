"""`federation dashboard`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Final

import typer

from federation import interrupts
from federation.cli.options import AsJson, ShowPayloads
from federation.cli.output import print_json, print_lines
from federation.cli.problems import Kind, fail
from federation.cli.session import LogLevel, load_settings, start_logging

if TYPE_CHECKING:
    from federation.run import OpenBeside

PORT: Final = 8765


def dashboard(
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Where it listens.")] = PORT,
    allow_actions: Annotated[
        bool, typer.Option("--allow-actions", help="Without accounts: let everybody who reaches it act, not only look.")
    ] = False,
    show_payloads: ShowPayloads = False,
    new_account: Annotated[
        str | None,
        typer.Option("--new-account", metavar="NAME", help="Print an account for this name, and serve nothing."),
    ] = None,
    viewer: Annotated[bool, typer.Option("--viewer", help="With --new-account: it looks, and does not act.")] = False,
    token: Annotated[
        bool, typer.Option("--token", help="With --new-account: by a token instead of a password.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show this node in the browser, until stopped.

    It listens on FEDERATION_DASHBOARD_BIND, by default on loopback, and shows. With FEDERATION_DASHBOARD_ACCOUNTS
    everybody has to log in, and operators act. `run` and `workers run` serve it, too, with `--dashboard-port`.
    """
    if new_account is not None:
        _print_account(new_account, viewer=viewer, token=token, as_json=as_json)
        return
    from federation.run import run

    settings = load_settings(node=True)
    opened = beside(port, allow_actions=allow_actions, shows_texts=show_payloads)
    start_logging(LogLevel.INFO)
    interrupts.run(run(settings, workers=False, node=False, beside=opened))
    if as_json:
        print_json({"stopped": True})


def _print_account(name: str, *, viewer: bool, token: bool, as_json: bool) -> None:
    """Print an account. The password is asked for, or the first line of stdin; a token is shown once, on stderr."""
    with needing_the_extra():
        from workers.dashboard.accounts import Role, hash_password, make_token, parse_accounts
    try:
        if token:
            secret, digest = make_token()
            typer.echo(f"the token, which is shown once: {secret}", err=True)
        else:
            asked = sys.stdin.isatty()
            password = typer.prompt("Password", hide_input=True, err=True) if asked else sys.stdin.readline()
            digest = hash_password(password.rstrip("\n"))
        line = f"{name}:{(Role.VIEWER if viewer else Role.OPERATOR).value}:{digest}"
        parse_accounts(line)
    except ValueError as error:
        fail(str(error))
    if as_json:
        print_json({"account": line})
    else:
        print_lines([line])


def beside(port: int | None, *, allow_actions: bool = False, shows_texts: bool = False) -> OpenBeside | None:
    """Return what opens the dashboard on the port, beside the other parts of a process; None for no port."""
    if port is None:
        if shows_texts:
            fail("--show-payloads is for the dashboard: add --dashboard-port")
        return None
    with needing_the_extra():
        from federation.dashboard.serving import NodeDashboard
    return lambda federation: NodeDashboard(federation, port=port, allow_actions=allow_actions, shows_texts=shows_texts)


@contextmanager
def needing_the_extra() -> Iterator[None]:
    """Tell which package is missing, and how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        from workers.extras import extra_with, install

        extra = extra_with(error, part="dashboard")
        if extra is None:
            raise
        fail(f"the dashboard needs the package {error.name!r}: {install(extra)}", kind=Kind.MISSING_PACKAGE)
