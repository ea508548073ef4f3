"""Directories that are named in arguments and settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
"""One slash is enough: `pathlib` makes `s3:/bucket` of `s3://bucket`."""


def scheme_of(text: str) -> str | None:
    """Return the scheme of a URL, or None for a path. `pathlib` would make a directory of that name."""
    found = _SCHEME.match(text)
    return found[1].lower() if found else None


def parse_directory(text: str) -> Path:
    """Return the path of a directory on this machine.

    Raises:
        ValueError: it is the URL of something else; the message does not quote it.
    """
    if scheme_of(text):
        raise ValueError("must be a directory on this machine, not a URL")
    return Path(text)
