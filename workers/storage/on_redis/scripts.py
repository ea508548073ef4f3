"""Lua scripts, each put together from files in `lua` folders."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Script:
    """One script's text, and the SHA-1 it is called by."""

    text: str = field(repr=False)
    sha: str

    @classmethod
    def of(cls, text: str) -> Script:
        """The script with this text."""
        return cls(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def assembled(package: str, *parts: str) -> Script:
    """Join `batched.lua` and `states.lua` from here, and those files of `package`, in this order, into one script."""
    shared, own = files(__package__) / "lua", files(package) / "lua"
    paths = [shared / "batched.lua", shared / "states.lua", *(own / f"{part}.lua" for part in parts)]
    return Script.of("\n".join(path.read_text() for path in paths))
