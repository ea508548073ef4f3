"""What is public: names that others import, type, parse, alert on or read from the database.

    python -m tests.public > docs/reference/public.md

makes the page anew. A line that is gone from it is a promise that is broken: see docs/reference/stability.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from typing import Final

from click import Command, Parameter
from pydantic import SecretStr
from pydantic_core import PydanticUndefined
from typer.main import get_command

from db import FederationTable, HostTable
from federation.base.settings.settings import Settings
from federation.cli.app import app
from federation.cli.problems import INTERRUPTED, NOT_FOUND, USAGE_ERROR, Kind
from tests.federation.test_documented_names import all_events, metric_names

MODULES: Final = (
    *("federation", "federation.activitypub", "federation.sync", "federation.sync.activitypub", "federation.testing"),
    *("workers", "workers.storage", "workers.sync", "workers.testing"),
)
EXITS: Final = (
    "0 all went well",
    f"{NOT_FOUND} a problem was found, or there is nothing to do it to",
    f"{USAGE_ERROR} wrong usage or settings, or what is needed does not answer",
    f"{INTERRUPTED} Ctrl-C",
)
HEAD: Final = """# What is public

What is listed here is promised to stay: see [Versions](stability.md). Everything else may change in any release. The
page is made from the code, and a test compares the two.
"""


def page() -> str:
    """The page, as it is to be."""
    parts = {
        "Python": python(),
        "Settings": settings(),
        "Commands": commands(),
        "Exit statuses": EXITS,
        "Kinds of errors": sorted(Kind),
        "Tables": tables(),
        "Metrics": sorted(metric_names()),
        "Log events": sorted(all_events()),
    }
    shown = "\n".join(f"\n## {title}\n\n```text\n" + "\n".join(lines) + "\n```" for title, lines in parts.items())
    return f"{HEAD}{shown}\n\nWhat the commands print with `--json` is in [its own page](../cli-json.md).\n"


def python() -> Iterator[str]:
    """Each name that a module exports, with its parameters if it can be called."""
    for module in MODULES:
        there = import_module(module)
        for name in sorted(there.__all__):
            value = getattr(there, name)
            is_enum = isinstance(value, type) and issubclass(value, Enum)
            yield f"{module}.{name}" + (f": {' '.join(each.name for each in value)}" if is_enum else parameters(value))


def parameters(value: object) -> str:
    """Their names, and a `=` after those that may be left out; nothing for what has none, or takes what any does."""
    if not callable(value) or (isinstance(value, type) and issubclass(value, BaseException)):
        return ""
    try:
        found = inspect.signature(value).parameters.values()
    except ValueError:
        return ""
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    shown, before = [], None
    for each in found:
        if each.kind is each.KEYWORD_ONLY and before not in (each.KEYWORD_ONLY, each.VAR_POSITIONAL):
            shown.append("*")
        optional = "=" if each.default is not each.empty else ""
        shown.append(f"{marks.get(each.kind, '')}{each.name}{optional}")
        before = each.kind
    return f"({', '.join(shown)})"


def settings() -> Iterator[str]:
    for name, field in sorted(Settings.model_fields.items()):
        default = field.default.get_secret_value() if isinstance(field.default, SecretStr) else field.default
        has_one = default is not PydanticUndefined and default is not None
        yield f"{name.upper()} = {default}" if has_one else name.upper()


def commands() -> Iterator[str]:
    """Each command with its arguments, and its options by their longest names."""

    def walk(command: Command, *path: str) -> Iterator[str]:
        for name, each in sorted(getattr(command, "commands", {}).items()):
            yield from walk(each, *path, name)
        if not hasattr(command, "commands"):
            yield " ".join(("federation", *path, *map(_typed, command.params)))

    yield from walk(get_command(app))


def _typed(parameter: Parameter) -> str:
    is_option = parameter.param_type_name == "option"
    return max(parameter.opts, key=len) if is_option else (parameter.name or "").upper()


def tables() -> Iterator[str]:
    """Each column that is ours, and each of the host's that we read."""
    for base in (FederationTable, HostTable):
        for table in base.metadata.sorted_tables:
            for column in table.columns:
                yield f"{table.name}.{column.name} {column.type}{' null' if column.nullable else ''}"


if __name__ == "__main__":
    print(page(), end="")
