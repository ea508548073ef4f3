"""The one node of a process."""

from __future__ import annotations

import gc
from typing import Final

from federation.app import Federation
from federation.base.settings import Settings

COLLECT_AFTER: Final = 10_000
"""Objects made and kept; CPython's 700 to 2 000 are a few deliveries."""


class _Process:
    """Written by the functions below."""

    federation: Federation | None = None


def get_federation() -> Federation:
    """This process's node, made from the environment on first use.

    Raises:
        ConfigurationError: lists every malformed setting.
    """
    if _Process.federation is None:
        _Process.federation = Federation(Settings.load())
    return _Process.federation


def adopt(federation: Federation) -> None:
    """`federation` is this process's node: what the application's tasks use is what runs them."""
    _Process.federation = federation


def release() -> Federation | None:
    """This process has no node any more; the one it had is for the caller to close."""
    federation, _Process.federation = _Process.federation, None
    return federation


def set_aside_loaded() -> None:
    """Garbage collections pass over what the process holds now, its code above all, and come less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])
