"""Variables that look like settings and are none: a misspelt name has no effect, and nobody would notice."""

from __future__ import annotations

import os
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

from dotenv import dotenv_values

from federation.base.settings.settings import ENV_FILE, Settings

PREFIX: Final = "FEDERATION_"
NEAR: Final = 0.8
VERY_NEAR: Final = 0.93


def misspelt() -> dict[str, str | None]:
    """Return the unknown variables of the environment and of `.env`, each with the one that was probably meant.

    Only variables count that begin with `FEDERATION_`, or almost do.
    """
    known = [name.upper() for name in Settings.model_fields if name.upper().startswith(PREFIX)]
    return {
        name: next(iter(get_close_matches(name.upper(), known, n=1, cutoff=NEAR)), None)
        for name in sorted({*os.environ, *_in_env_file()})
        if name.upper() not in known and _is_meant_for_us(name.upper(), known)
    }


def told(name: str, nearest: str | None) -> str:
    """Say the same in a sentence."""
    return f"{name} has no effect: there is no such setting" + (f"; is {nearest} meant?" if nearest else "")


def _is_meant_for_us(name: str, known: Iterable[str]) -> bool:
    return name.startswith(PREFIX) or bool(get_close_matches(name, known, n=1, cutoff=VERY_NEAR))


def _in_env_file() -> Iterable[str]:
    try:
        return dotenv_values(ENV_FILE, encoding="utf-8", interpolate=False) if ENV_FILE.is_file() else ()
    except UnicodeDecodeError:  # which `Settings.load` reports
        return ()
