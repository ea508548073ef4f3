"""`federation keys`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from federation.cli.options import AsJson, group
from federation.cli.output import print_json, print_lines
from federation.cli.problems import NOT_FOUND, fail
from federation.cli.session import load_settings

app = group("This node's keys: show, generate.")


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

    As lines of a .env, in a file that only you can read. For a new node: one that others know must not change its
    keys so, they would take it for an impostor.
    """
    from federation.base.settings import write_env_file
    from federation.protocol.keys import generate_own_keys

    values = generate_own_keys().to_env()
    try:
        write_env_file(file, values)
    except FileExistsError:
        fail(f"{file} exists and stays as it is", status=NOT_FOUND)
    _print({name: value for name, value in values.items() if "PRIVATE" not in name}, as_json)


def _print(values: Mapping[str, str], as_json: bool) -> None:
    if as_json:
        print_json(values)
    else:
        print_lines(f'{name}="{value}"' for name, value in values.items())
