"""`federation keys`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from federation.cli.options import AsJson, Yes, group
from federation.cli.orders import order
from federation.cli.output import confirm, print_json, print_lines, print_table, progress
from federation.cli.problems import NOT_FOUND, fail
from federation.cli.session import load_settings, with_node

if TYPE_CHECKING:
    from federation.admin.keys import RotationState

app = group("This node's keys: show, generate, rotate.")


@app.command("show")
def show(
    private: Annotated[bool, typer.Option("--private", help="The secret keys too: who has them is this node.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the public keys, as others know them."""
    settings = load_settings()
    keys = settings.own_keys()
    if keys is None:
        settings.require_node_here()
        fail("this node has no keys; `federation init` makes a set")
    values = keys.to_env()
    if not private:
        values = {name: value for name, value in values.items() if "PRIVATE" not in name}
    _print(values, as_json)


@app.command("generate")
def generate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that is not there yet.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Write a fresh set of keys to a new file.

    They are lines of a .env, in a file that only you can read. Use this for a new node only: others would take a node
    that they know for an impostor if its keys changed like this.
    """
    from federation.base.settings.settings import write_env_file
    from federation.protocol.keys import generate_own_keys

    values = generate_own_keys().to_env()
    try:
        write_env_file(file, values)
    except FileExistsError:
        fail(f"{file} exists and stays as it is", status=NOT_FOUND)
    _print({name: value for name, value in values.items() if "PRIVATE" not in name}, as_json)


@app.command("rotate")
def rotate(
    only: Annotated[
        str | None, typer.Option("--only", metavar="URL", help="Ask this server alone, to see it work.")
    ] = None,
    forget_old: Annotated[
        bool, typer.Option("--forget-old", help="Drop the old keys, whoever knows us by them.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Change this node's keys: bring new ones to every server we know.

    The new keys are first written to .env, beside the old ones, which stay in use with servers that do not know the new
    ones yet. If it is interrupted, run it again: it goes on with the same keys. Servers that are away are asked when
    they are back. Ten minutes after the last one has confirmed, the old keys are dropped.
    """
    from federation.admin import keys
    from federation.admin.servers.servers import server_url

    name = None if only is None else server_url(only)
    load_settings(node=True)
    if name is not None and with_node(lambda node: node.registry.find(name)) is None:
        fail(f"{name} is not in the registry", status=NOT_FOUND)
    if forget_old:
        number = len(with_node(keys.waiting))
        confirm(f"Drop the old keys? Servers that know us by them alone: {number}.", yes=yes)
        asked = order("keys rotate", forget_old=True)
        state = with_node(lambda node: keys.forget_old(node, order=asked))
    else:
        asked = order("keys rotate", server_url=name, only=name)
        state = with_node(lambda node: keys.rotate(node, only=name, progress=progress, order=asked))
    if as_json:
        print_json(state)
    else:
        _tell(state)
    if state.waiting:
        raise typer.Exit(NOT_FOUND)


def _tell(state: RotationState) -> None:
    from federation.admin.servers.known_keys import meaning

    print_lines([f"{state.confirmed} of {state.confirmed + len(state.waiting)} servers know the new keys"])
    if state.waiting:
        print_table(
            ("URL", "PROBLEM", "LAST ASKED"), ((each.url, each.problem, each.tried_at) for each in state.waiting)
        )
        print_lines(
            f"{problem}: {meaning(problem)}"
            for problem in sorted({each.problem for each in state.waiting if each.problem})
        )
        print_lines(["they know the old keys, which stay; those that were asked in vain are asked again each hour"])
    if state.restart_needed:
        print_lines(["the keys are set in the environment: restart every process of this node when they change there"])
    elif state.old_kept and not state.waiting:
        print_lines(["the scheduler drops the old keys in ten minutes; `--forget-old` drops them now"])


def _print(values: Mapping[str, str], as_json: bool) -> None:
    if as_json:
        print_json(values)
    else:
        print_lines(f'{name}="{value}"' for name, value in values.items())
