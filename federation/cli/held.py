"""`federation deliveries hold`, `release` and `expire`: what becomes of held deliveries when somebody says so."""

from __future__ import annotations

from typing import Annotated

import typer

from federation.cli.options import AsJson, ServerUrl
from federation.cli.orders import order
from federation.cli.output import print_json, print_lines, progress
from federation.cli.problems import fail
from federation.cli.session import with_database, with_node


def hold(url: ServerUrl, as_json: AsJson = False) -> None:
    """Hold deliveries to a server, until `release`.

    New ones are held as well, and nothing is lost. Attempts under way go on.
    """
    from federation.admin.deliveries import holds
    from federation.admin.servers.servers import server_url

    name = server_url(url)
    asked = order("deliveries hold", server_url=name)
    owed = with_node(lambda federation: holds.hold(federation, name, order=asked))
    if as_json:
        print_json({"url": name, "owed": owed})
    else:
        print_lines(
            [f"deliveries to {name} are held ({owed} owed now); `federation deliveries release {name}` sends them"]
        )


def release(
    url: Annotated[
        str | None,
        typer.Argument(metavar="[URL]", help="The server: https://peer.example, or peer.example.", show_default=False),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="For every server, and at once.")] = False,
    as_json: AsJson = False,
) -> None:
    """Send what is held for a server, whatever is known of it.

    Its link counts as up, and an operator's hold or a pause that it asked for is over. If it is still down, the link
    goes down again. Deliveries go out slowly at first. With `--all` every hold is over, and every held delivery has a
    job in the queue when the command ends; those that wait for an older one follow it.
    """
    from db import DeliveryState
    from federation.admin.deliveries import deliveries, holds
    from federation.admin.servers.servers import server_url

    if everything == (url is not None):
        fail("say which: a URL, or --all")
    if url is not None:
        name = server_url(url)
        asked = order("deliveries release", server_url=name)
        done = with_node(lambda federation: holds.release(federation, name, order=asked))
    else:
        held = [deliveries.is_in(DeliveryState.HELD)]
        total = with_database(lambda database: deliveries.count(database, held))
        with progress(total, "releasing") as bar:
            asked = order("deliveries release", all=True)
            done = with_node(lambda federation: holds.release_all(federation, progress=bar, order=asked))
    if as_json:
        print_json(done)
        return
    behind = f"; {done.in_order} more wait for an older one, and follow it" if done.in_order else ""
    print_lines([f"{_counted(done.released)} released{behind}"])


def expire(as_json: AsJson = False) -> None:
    """Give up what is held for too long, now.

    That is longer than FEDERATION_DELIVERY_MAX_AGE. It is done by itself, but not for 24 hours of sweeping after more
    than an hour passed between two sweeps: the clock may have been set. This says that it is right, and ends that time.
    """
    from federation.admin.deliveries import holds

    expired = with_node(lambda federation: holds.expire(federation, order=order("deliveries expire")))
    if as_json:
        print_json({"expired": expired})
    else:
        print_lines([f"{_counted(expired)} given up as too old; what gets too old from now on is given up by itself"])


def add_commands(app: typer.Typer) -> None:
    """Add these commands to those of `federation deliveries`."""
    for name, command in (("hold", hold), ("release", release), ("expire", expire)):
        app.command(name)(command)


def _counted(number: int) -> str:
    return "1 delivery is" if number == 1 else f"{number} deliveries are"
