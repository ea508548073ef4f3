"""Lua scripts, each assembled from files in `lua` folders."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Final, TypeAlias

CONFIRMED: Final = frozenset(
    {"enqueue", "enqueue_once", "replace_cron", "settle", "cancel", "complete", "retry", "remove"}
    | {"promote", "drain", "clean", "keep"}
)
"""The scripts whose change replicas confirm before it is acknowledged, where that is asked for; see `redis_urls`."""


ScriptCall: TypeAlias = tuple[str, Sequence[str | bytes | int]]
"""The name of a script, and its arguments."""


@dataclass(frozen=True, slots=True)
class Script:
    """A script's text, and the SHA-1 it is called by."""

    text: str = field(repr=False)
    sha: str

    @classmethod
    def of(cls, text: str) -> Script:
        """Make the script with this text."""
        return cls(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def assembled(package: str, *parts: str) -> Script:
    """Join what every script begins with and the `parts` for `package`, in this order, into one script."""
    return Script.of(joined(package, "batched", "states", "foreign", *parts))


def joined(package: str, *parts: str) -> str:
    """Return the text of these files, one after the other: those of `package`, or from here those that it lacks."""
    own, shared = files(package) / "lua", files(__package__) / "lua"
    paths = [own / f"{part}.lua" for part in parts]
    return "\n".join((path if path.is_file() else shared / path.name).read_text() for path in paths) + "\n"
