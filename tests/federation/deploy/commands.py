"""What units and containers run and set, held against the command line's own parser and the one reader of settings."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Sequence
from functools import cache

from typer.main import get_command

from federation.base.settings.settings import Settings
from federation.cli.app import app

EXTERNAL = frozenset({"PATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PIP_NO_CACHE_DIR"})
"""Variables that are Python's or pip's."""


def refusal(arguments: Sequence[str]) -> str | None:
    """What `federation` says against these arguments: commands, options and their number; None if it takes them."""
    with io.StringIO() as told, contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        try:
            _command()(args=[*arguments, "--help"], prog_name="federation")
        except SystemExit as end:
            return told.getvalue() if end.code else None
    raise AssertionError(f"{arguments} did not end")


@cache
def _command() -> Callable[..., object]:
    """The parser, made once: that takes ten times as long as to ask it."""
    return get_command(app)


def unknown_variables(names: Iterable[str]) -> set[str]:
    """Those that no setting has."""
    return set(names) - EXTERNAL - {name.upper() for name in Settings.model_fields}
