"""Every command there is, found in the application itself, with arguments that it takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import typer

from federation.cli.app import app
from tests.federation.cli.elsewhere import PEER
from tests.federation.conftest import OWN_URL as OWN

ARGUMENTS: Final = {
    "servers show": [PEER],
    "servers discover": [PEER],
    "servers probe": [PEER],
    "servers set": [PEER, "--profile", "original"],
    "servers accept-key": [PEER],
    "servers forget": [PEER, "--yes"],
    "why": [PEER],
    "deliveries show": ["1"],
    "deliveries retry": ["--all"],
    "deliveries drop": ["--all", "--yes"],
    "deliveries hold": [PEER],
    "deliveries release": [PEER],
    "blacklist add": ["https://evil.example", "--reason", "spam"],
    "blacklist remove": ["https://evil.example"],
    "blacklist check": [PEER],
    "blacklist import": ["rules.csv"],
    "blacklist export": ["--output", "out.csv"],
    "queues clean": ["--yes"],
    "queues repair": ["--drop", "--yes"],
    "scheduler run": ["purge"],
    "keys generate": ["keys.env"],
    "keys rotate": ["--forget-old", "--yes"],
    "users add": ["alice"],
    "follow": ["bob", PEER, "--as", "carol"],
    "post": ["hello", "--as", "carol"],
    "activitypub actors add": [f"{OWN}/users/alice"],
    "activitypub actors remove": [f"{OWN}/users/alice", "--yes"],
    "activitypub keys rotate": [f"{OWN}/users/alice"],
    "activitypub received retry": ["--all"],
    "db backup": ["copy.sqlite3"],
    "db copy": ["--from", "old.sqlite3"],
    "analytics run": ["--out", "analytics"],
    "analytics export": ["--out", "analytics"],
    "analytics report": ["--out", "analytics"],
    "analytics forget": [PEER, "--out", "analytics"],
}
"""Of the commands that need some."""


def every_command() -> list[str]:
    """As they are typed, such as `servers list`."""
    return sorted([*_below(app, ""), "analytics run", "analytics export", "analytics report", "analytics forget"])


def typed(command: str) -> list[str]:
    """The command with arguments that it takes."""
    return [*command.split(), *ARGUMENTS.get(command, [])]


def _below(group: typer.Typer, prefix: str) -> Iterator[str]:
    for command in group.registered_commands:
        if command.name != "analytics":  # it parses its own, see `every_command`
            yield f"{prefix}{command.name}"
    for each in group.registered_groups:
        assert each.typer_instance is not None
        yield from _below(each.typer_instance, f"{prefix}{each.name} ")
