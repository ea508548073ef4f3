"""What units and containers run and set, held against the command line's own parser and the one reader of settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from typer.testing import CliRunner

from federation.base.settings.settings import Settings
from federation.cli.app import app

EXTERNAL = frozenset({"PATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PIP_NO_CACHE_DIR"})
"""Variables that are Python's or pip's."""


def refusal(arguments: Sequence[str]) -> str | None:
    """What `federation` says against these arguments: commands, options and their number; None if it takes them."""
    told = CliRunner().invoke(app, [*arguments, "--help"])
    return None if told.exit_code == 0 else told.output


def unknown_variables(names: Iterable[str]) -> set[str]:
    """Those that no setting has."""
    return set(names) - EXTERNAL - {name.upper() for name in Settings.model_fields}
