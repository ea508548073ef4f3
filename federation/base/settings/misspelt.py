"""What is set without any effect, which nobody would notice: a misspelt name, a line of `.env` that sets nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Final

from dotenv.parser import Binding, Original, parse_stream

from federation.base.settings.settings import ENV_FILE, Settings

PREFIX: Final = "FEDERATION_"
NEAR: Final = 0.8
VERY_NEAR: Final = 0.93


def without_effect() -> list[str]:
    """Name the lines of `.env` that set nothing, and the unknown variables there and in the environment.

    Only variables count that begin with `FEDERATION_`, or almost do. No value is told.
    """
    bindings = _in_env_file()
    broken = [_line(each.original) for each in bindings if each.error]
    unknown = _misspelt({*os.environ, *(each.key for each in bindings if each.key is not None)})
    return [
        *(f"{ENV_FILE}: line {line} has no effect: it is no NAME=VALUE" for line in broken),
        *(_told(name, nearest) for name, nearest in unknown.items()),
    ]


def _line(original: Original) -> int:
    """Return where the text begins that is there: blank lines before it count as part of it."""
    blank = len(original.string) - len(original.string.lstrip())
    return original.line + original.string.count("\n", 0, blank)


def _misspelt(names: Iterable[str]) -> dict[str, str | None]:
    known = [name.upper() for name in Settings.model_fields if name.upper().startswith(PREFIX)]
    return {
        name: next(iter(get_close_matches(name.upper(), known, n=1, cutoff=NEAR)), None)
        for name in sorted(names)
        if name.upper() not in known and _is_meant_for_us(name.upper(), known)
    }


def _told(name: str, nearest: str | None) -> str:
    return f"{name} has no effect: there is no such setting" + (f"; is {nearest} meant?" if nearest else "")


def _is_meant_for_us(name: str, known: Iterable[str]) -> bool:
    return name.startswith(PREFIX) or bool(get_close_matches(name, known, n=1, cutoff=VERY_NEAR))


def _in_env_file() -> Sequence[Binding]:
    if not ENV_FILE.is_file():
        return ()
    try:
        with ENV_FILE.open(encoding="utf-8") as file:
            return tuple(parse_stream(file))
    except UnicodeDecodeError:  # which `Settings.load` reports
        return ()
